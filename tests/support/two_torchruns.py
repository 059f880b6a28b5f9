"""Two torchruns with two ranks each, on two hosts: network namespaces. Ends with the larger of their statuses.

`unshare -rn python -m tests.support.two_torchruns CONFIG [STEP]`: rank 3 is killed in a wave of the step after STEP.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
from typing import Any

from bench.suites.hosts_net import INTERFACE, Hosts
from tests.support.deadlines import LONG_S

_NAME, _VICTIM = "tests.support.two_torchruns", 3


def start(config: str, *step: str) -> int:
    hosts, here = Hosts(2), os.environ | {"GLOO_SOCKET_IFNAME": INTERFACE}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += ["--master-addr", hosts.addresses[0], "--master-port", "29500", "--node-rank"]
    started = [
        subprocess.Popen(hosts.on(node, *command, str(node), "-m", _NAME, *step, "--config", config), env=here)
        for node in range(2)
    ]
    try:
        return max(process.wait(timeout=LONG_S) for process in started)
    finally:
        for process in started:
            process.kill()
        hosts.close()


def _die_after(step: int) -> None:
    from odc_triton.jobs.train.sft_run import SftRun
    from odc_triton.sequence.exchange import SequenceExchange

    publish, train_step = SequenceExchange.publish, SftRun.train_step

    def take_step(self: SftRun, **given: Any) -> Any:
        def die(*_: Any, **__: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        SequenceExchange.publish = die if self.state.step == step else publish
        return train_step(self, **given)

    SftRun.train_step = take_step


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit(start(*sys.argv[1:]))
    last = [int(sys.argv.pop(1)) for _ in range(sys.argv[1] != "--config")]
    if last and os.environ["RANK"] == str(_VICTIM):
        _die_after(*last)
    runpy.run_module("odc_triton.train.sft", run_name="__main__")
