"""`train grpo` with vLLM itself as the sampler."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from odc_triton.jobs.train.grpo import check_before_start
from odc_triton.jobs.train.grpo_options import GrpoOptions
from tests.support import jobs, ranks
from tests.support.grpo_case import case
from tests.support.jobs import ENDED, lines
from tests.support.vllm_real import ENVIRONMENT, RealServer, require_vllm

require_vllm()
pytestmark = pytest.mark.slow

STEPS, NEW_TOKENS = 4, 12


def train(rank: int, world: int, wanted: GrpoOptions) -> str:
    """How the job ended on this rank."""
    os.environ.update(ENVIRONMENT)
    (end,) = jobs.train(rank, world, [wanted])
    return end


def options(folder: Path, out: Path, **changes: object) -> GrpoOptions:
    """Steps so large that an older policy would show in `mismatch`."""
    usual = {"init": None, "model": str(folder / "start"), "steps": STEPS, "max_new_tokens": NEW_TOKENS, "lr": 3e-2}
    return case(folder, out=str(out), **usual | {"importance": "token_truncate"} | changes)


def assert_sampled_by_the_policy(out: Path) -> None:
    """`mismatch` is the mean over tokens of a ratio of two probabilities, which differ by rounding only: see
    test_engines.py. It is off by 0.03 if vLLM keeps its first weights.
    """
    found = lines(out)
    assert len(found) == STEPS
    for line in found:
        assert line["mismatch"] == pytest.approx(1, abs=2e-5)
        assert line["grad_norm"] > 0


@pytest.mark.parametrize(("world", "lora_rank"), [(1, 0), (2, 0), (2, 4)])
def test_colocate(folder: Path, tmp_path: Path, world: int, lora_rank: int) -> None:
    how = {"engine": "vllm-colocate", "vllm_memory": 0.1, "token_cap": 512, "lora_rank": lora_rank}
    wanted = options(folder, tmp_path / "out", **how)
    assert ranks.run(train, world, wanted) == [ENDED] * world
    assert_sampled_by_the_policy(tmp_path / "out")


@pytest.mark.parametrize(("world", "rollout"), [(1, None), (2, None), (2, "tests.rollouts:turns")])
def test_server(folder: Path, server: RealServer, tmp_path: Path, world: int, rollout: str | None) -> None:
    how = {"engine": "vllm-server", "vllm_server": server.address, "rollout": rollout}
    wanted = options(folder, tmp_path / "out", **how)
    check_before_start(wanted, world)
    assert ranks.run(train, world, wanted) == [ENDED] * world
    assert_sampled_by_the_policy(tmp_path / "out")
