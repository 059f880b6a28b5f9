"""`train sft --split-sequences` on hosts, of which each is a replica."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.suites.hosts_net import inside
from odc_triton.jobs.options.config_file import write_config
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs, namespaces, ranks
from tests.support.deadlines import LONG_S
from tests.support.jobs import ENDED
from tests.support.leftovers import environment
from tests.support.sft_case import case, write_case

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples of up to twice the cap."""
    return write_case(tmp_path_factory.mktemp("case"), records=60, characters=300)


def options(folder: Path, out: Path, **changes: object) -> SftOptions:
    wanted = {"out": str(out), "steps": 4, "truncate": False, "eval_fraction": 0.2, "eval_every": 3, "exact": True}
    wanted |= {"token_cap": 128, "split_sequences": True, "samples_per_rank": 3}
    return case(folder, **wanted | changes)


def left(out: str) -> tuple[dict[str, torch.Tensor], list[tuple[float, float | None]]]:
    """The weights, and each step's loss and that of the evaluation after it."""
    lines = [(line["loss"], line.get("eval_loss")) for line in jobs.lines(out)]
    return load_file(Path(out) / "model" / "model.safetensors"), lines


def _on_hosts(rank: int, world: int, wanted: Sequence[SftOptions]) -> list[str]:
    """Each of two hosts is a replica."""
    os.environ["ODC_HOST"] = f"host-{rank * 2 // world}"
    return jobs.train(rank, world, wanted)


def test_what_hosts_refuse(folder: Path, tmp_path: Path) -> None:
    queue = options(folder, tmp_path / "queue", balance="queue")
    said = "--split-sequences goes with several replicas only by --balance mini"
    assert all(said in refused for (refused,) in ranks.run(_on_hosts, 4, [queue]))
    (alone,), _ = ranks.run(_on_hosts, 2, [replace(queue, balance="mini")])
    assert "there is a replica on each of 2 hosts, of one rank each, and --split-sequences splits" in alone


def test_on_two_hosts_killed_in_a_wave_a_run_goes_on(folder: Path, tmp_path: Path) -> None:
    """Torchruns in two network namespaces; the same bits as a run that nothing disturbed."""
    namespaces.require()
    wanted = options(folder, tmp_path / "out", checkpoint_every=1, resume="auto")
    write_config(tmp_path / "run.yaml", wanted, comment="the run")
    command = inside(sys.executable, "-m", "tests.support.two_torchruns", str(tmp_path / "run.yaml"))
    said = []
    for step in (["2"], []):
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run([*command, *step], env=environment(), timeout=2 * LONG_S, **streams)
        assert (done.returncode == 0) == (step == []), done.stdout
        said.append(done.stdout)
    killed, again = said
    for rank in (0, 1):  # of the other host
        assert re.search(rf"rank {rank} was waiting for '.*': rank 3 died", killed), killed
    assert "continuing after step 2" in again
    whole = replace(wanted, out=str(tmp_path / "whole"), replicas=2)
    assert jobs.run(4, whole) == [ENDED]
    (weights, lines), (wanted_weights, wanted_lines) = left(wanted.out), left(whole.out)
    assert lines == wanted_lines
    assert all(torch.equal(weights[name], each) for name, each in wanted_weights.items())
