"""`train sft --split-sequences` over replicas: as without splitting on one rank; resumed elsewhere; the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.suites.hosts_net import inside
from odc_triton.jobs.data.dataset import DataOptions
from odc_triton.jobs.data.tokenizer import TextEncoder, load_tokenizer
from odc_triton.jobs.options.config_file import write_config
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs, namespaces, ranks
from tests.support.deadlines import LONG_S
from tests.support.jobs import ENDED
from tests.support.leftovers import environment
from tests.support.sft_case import case, write_case
from tests.support.tokenized import tokenize_file

CAP, STEPS = 128, 6
LAYERS = {"gradient_checkpointing": True, "replace_layers": True, "fused_head": True}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of up to twice the cap; of those to evaluate on, an odd number is over it."""
    folder = write_case(tmp_path_factory.mktemp("case"), records=60, characters=300)
    lines = (folder / "data.jsonl").read_text().splitlines(keepends=True)
    encoder, options = TextEncoder.of(load_tokenizer(folder / "tokenizer.json")), DataOptions(max_tokens=2 * CAP)
    lengths = tokenize_file(folder / "data.jsonl", encoder, options).lengths.tolist()
    longer = [line for line, length in zip(lines, lengths, strict=True) if length > CAP]
    shorter = [line for line, length in zip(lines, lengths, strict=True) if length <= CAP]
    assert len(longer) > 20
    (folder / "eval.jsonl").write_text("".join(shorter[:3] + longer[:5]))
    return folder


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"out": str(out), "steps": STEPS, "truncate": False, "eval_data": str(folder / "eval.jsonl")}
    wanted |= {"token_cap": CAP, "split_sequences": True, "eval_every": 3}
    return case(folder, **wanted | changes)


def weights(out: str) -> torch.Tensor:
    (file,) = Path(out).rglob("*.safetensors")
    return torch.cat([value.double().flatten() for _, value in sorted(load_file(file).items())])


def losses(out: str) -> tuple[list[float], list[float]]:
    lines = jobs.lines(out)
    return [line["loss"] for line in lines], [line["eval_loss"] for line in lines if "eval_loss" in line]


def _on_hosts(rank: int, world: int, wanted: Sequence[SftOptions], hosts: int) -> list[str]:
    """Each host is a replica; ranks are not equally fast."""
    from odc_triton.jobs.train.sft_run import SftRun

    next_packs = SftRun.next_packs

    def late(self: SftRun) -> object:
        time.sleep(0.03 * (world - rank))
        return next_packs(self)

    SftRun.next_packs = late
    os.environ["ODC_HOST"] = f"host-{rank * hosts // world}"
    return jobs.train(rank, world, wanted)


def test_exact_sums_have_the_same_bits(folder: Path, tmp_path: Path) -> None:
    """By --replicas, and on two hosts, in another order of arrival."""
    wanted = options(folder, tmp_path / "one", samples_per_rank=3, exact=True, replicas=2, **LAYERS)
    on_hosts = replace(wanted, out=str(tmp_path / "other"), replicas=None)
    assert jobs.run(4, wanted) == [ENDED]
    queue = replace(on_hosts, out=str(tmp_path / "queue"), balance="queue")
    first, *others = ranks.run(_on_hosts, 4, [on_hosts, queue], 2)
    assert others == [first] * 3
    ended, refused = first
    assert ended == ENDED
    said = "--split-sequences goes with several replicas only by --balance mini"
    assert said in refused
    assert losses(wanted.out) == losses(on_hosts.out)
    assert torch.equal(weights(wanted.out), weights(on_hosts.out))
    (alone,), _ = ranks.run(_on_hosts, 2, [replace(queue, balance="mini")], 2)
    assert "there is a replica on each of 2 hosts, of one rank each, and --split-sequences splits" in alone


def test_on_two_hosts_killed_in_a_wave_a_run_goes_on(folder: Path, tmp_path: Path) -> None:
    """Torchruns in two network namespaces; the same bits as a run that nothing disturbed."""
    namespaces.require()
    how = {"samples_per_rank": 3, "steps": 4, "checkpoint_every": 1, "exact": True, "resume": "auto"}
    wanted = options(folder, tmp_path / "out", **how)
    write_config(tmp_path / "run.yaml", wanted, comment="the run")
    command = inside(sys.executable, "-m", "tests.support.two_torchruns", str(tmp_path / "run.yaml"))
    said = []
    for step in (["2"], []):
        done = subprocess.run(
            [*command, *step],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * LONG_S,
        )
        assert (done.returncode == 0) == (step == []), done.stdout
        said.append(done.stdout)
    killed, again = said
    for rank in (0, 1):  # of the other host
        assert re.search(rf"rank {rank} was waiting for '.*': rank 3 died", killed), killed
    assert "continuing after step 2" in again
    whole = replace(wanted, out=str(tmp_path / "whole"), replicas=2)
    assert jobs.run(4, whole) == [ENDED]
    assert losses(wanted.out) == losses(whole.out)
    assert torch.equal(weights(wanted.out), weights(whole.out))
