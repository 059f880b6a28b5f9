"""A rank of a trainer that is killed at any time is named by the others, also where they wait in gloo's collectives."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import pair_case, ranks, slow, trl_case
from tests.support.models import build
from tests.support.trainer_case import odc_trainer, samples

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL uses attributes that transformers has renamed
ALL = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 2}
# Python's functions in which ranks wait for each other, by file.
_COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast")
_WAITS = {"distributed_c10d.py": _COLLECTIVES, "barrier.py": ("exchange",)}


def _trainer(kind: str, world: int, folder: str) -> Any:
    if kind == "Odc":
        return odc_trainer(folder, world, eval_dataset=samples()[:4], per_device_train_batch_size=1, **ALL)
    if kind == "GRPO":
        return trl_case.odc_trainer(folder, world, **ALL)
    return pair_case.trainer_of(kind, True, world, folder, f"{folder}/start", dict(ALL))


def _start(rank: int, world: int, folder: str, kind: str) -> None:
    """The folder that the model comes from."""
    if kind == "Reward":
        pair_case.save_classifier(f"{folder}/start")
    else:
        build("qwen2").save_pretrained(f"{folder}/start")


def _killed(rank: int, world: int, folder: str, kind: str, victim: int, moment: int) -> int:
    """The victim dies as it begins to wait for the moment-th time; returns how often it waits in all."""
    waits = [0]

    def dies(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name in _WAITS.get(os.path.basename(code.co_filename), ()):
            waits[0] += 1
            if rank == victim and waits[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer = _trainer(kind, world, folder)
    sys.setprofile(dies)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(f"{folder}/final")
    sys.setprofile(None)
    return waits[0]


# Of each kind the moments at which a rank dies, up to about as many as it waits in all.
MOMENTS = {
    "Odc": (1, 5, 9, 15, 21, 25, 33),
    "DPO": (2, 12, 22, 32, 42),
    "Reward": (3, 13, 23, 33, 43),
    "GRPO": (4, 90, 180, 270, 350),
}
_FAST = ("Odc", 2, 5)
_EVERY = [(kind, world, moment) for kind in MOMENTS for moment in MOMENTS[kind] for world in (2, 3)]
# GRPO's groups of 4 completions don't fit 3 ranks.
KILLS = [_FAST, *(slow(*each) for each in _EVERY if each != _FAST and each[:2] != ("GRPO", 3))]


@pytest.mark.parametrize(("kind", "world", "moment"), KILLS)
def test_a_killed_rank_is_named(tmp_path: Path, kind: str, world: int, moment: int) -> None:
    folder, victim = str(tmp_path / "out"), moment % world
    if kind in ("DPO", "Reward"):
        ranks.run(_start, 1, folder, kind)
    with ranks.start(_killed, world, folder, kind, victim, moment) as job:
        outcomes = job.join()
    assert outcomes.pop(victim).signal == signal.SIGKILL
    for each in outcomes:
        assert (each.error_type, f"rank {victim} died" in each.error) == ("RankLost", True), each.error
