"""python ray_killed.py SCRIPT ARGS: a script of Ray Train, whose worker of rank 1 is killed in its fifth step, once."""

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train.torch
from ray.train.v2._internal.execution.context import get_train_context
from torch.optim.optimizer import register_optimizer_step_pre_hook

mark = Path("killed").resolve()


class KilledOnce(ray.train.torch.TorchTrainer):
    def __init__(self, train: Callable[[dict], None], **options: Any) -> None:
        def killed(config: dict) -> None:
            steps, polled = [], threading.Event()

            def before_step(*_: Any) -> None:
                steps.append(None)
                if len(steps) == 5 and not mark.exists():
                    mark.touch()
                    reports = get_train_context().execution_context.result_queue
                    take = reports.get_nowait
                    reports.get_nowait = lambda: (polled.set(), take())[1]
                    polled.wait()  # so Ray has the last checkpoint, and looks again after rank 0 has seen what follows
                    time.sleep(0.3)
                    os.kill(os.getpid(), signal.SIGKILL)

            if ray.train.get_context().get_world_rank() == 1:
                register_optimizer_step_pre_hook(before_step)
            train(config)

        super().__init__(killed, **options)


ray.train.torch.TorchTrainer = KilledOnce
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
