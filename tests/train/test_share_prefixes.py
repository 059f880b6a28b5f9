"""`train sft --share-prefixes`: the losses of the same order of samples, computed whole; what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.hf import PackingUnsupported
from odc_triton.jobs.train.model import build_model
from odc_triton.jobs.train.run_folder import require_same
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.plan.entries import Piece
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.planner import Planner
from odc_triton.plan.samples import Samples
from tests.support import jobs, ranks, slow
from tests.support.families import config_of, make_new_positions
from tests.support.sft_case import LICENSE, case, write_case

STEPS, STOP = 3, 2
ANSWERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven questions with four answers each, and six records alone; the answers of a question are far apart."""
    folder = write_case(tmp_path_factory.mktemp("share"), records=6)
    alone = (folder / "data.jsonl").read_text().splitlines()
    text = LICENSE.read_text()
    asked = [
        json.dumps(
            {"prompt": text[n * 700 : n * 700 + 160], "completion": text[n * 700 + 160 + 50 * a :][: 20 + 15 * a]}
        )
        for a in range(ANSWERS)
        for n in range(7)
    ]
    (folder / "data.jsonl").write_text("".join(f"{line}\n" for line in asked + alone))
    (folder / "alone.jsonl").write_text("".join(f"{line}\n" for line in alone))
    return folder


def options(folder: Path, **changes: object) -> SftOptions:
    usual = {"steps": STEPS, "samples_per_rank": 4, "share_prefixes": True, "lr": 3e-3}
    return case(folder, **usual | changes)


def train(rank: int, world: int, wanted: Sequence[tuple[SftOptions, bool]]) -> list[tuple[str, int, str]]:
    """How each job ended, the branches in this rank's packs, and its output. True: they share; False: samples are
    whole, in the same order.
    """
    own, found = Planner.packs, []

    def counted(self: Planner, rows: Samples, rank: int) -> MinibatchPacks:
        packs = own(self, rows if shares else replace(rows, prefixes=None), rank)
        counts.append(sum(isinstance(each, Piece) and each.parent is not None for pack in packs for each in pack))
        return packs

    with mock.patch.object(Planner, "packs", counted):
        for each, wants in wanted:
            counts, shares = [], wants
            with redirect_stdout(StringIO()) as output:
                (ended,) = jobs.train(rank, world, [each])
            found.append((ended, sum(counts), output.getvalue()))
    return found


CASES = {
    "split": {"split_sequences": True},
    "mixture, evaluated": {"eval_fraction": 0.2},
}
MORE = {
    "exact": {"exact": True},
    "fused head": {"fused_head": True},
    "replaced layers": {"replace_layers": True},
    "several packs": {"token_cap": 200, "gradient_checkpointing": True},
}


@pytest.mark.parametrize(("cases", "world"), [(CASES, 2), slow(MORE, 4)])
def test_losses_and_weights_are_those_of_whole_samples(
    folder: Path, tmp_path: Path, cases: dict[str, dict], world: int
) -> None:
    wanted = []
    for name, changes in cases.items():
        if "eval_fraction" in changes:
            data = tuple(str(folder / each) for each in ("data.jsonl", "alone.jsonl"))
            changes = changes | {"data": data, "data_weight": (1.0, 2.0)}
        changes = {"samples_per_rank": 8 // world, **changes}
        wanted += [
            (options(folder, out=str(tmp_path / f"{name} {shares}"), **changes), shares) for shares in (True, False)
        ]
    for (_, shares), of_rank in zip(wanted, zip(*ranks.run(train, world, wanted), strict=True), strict=True):
        assert {ended for ended, _, _ in of_rank} == {jobs.ENDED}
        assert (sum(count for _, count, _ in of_rank) >= STEPS) == shares
    for name in cases:
        found, want = (jobs.lines(tmp_path / f"{name} {shares}") for shares in (True, False))
        for key in ("loss", "grad_norm", "tokens", "epoch", "eval_loss"):
            values = [[line[key] for line in lines if key in line] for lines in (found, want)]
            assert values[0] == pytest.approx(values[1], rel=2e-5, abs=0), (name, key)
        weights, want = (load_file(tmp_path / f"{name} {each}/model/model.safetensors") for each in (True, False))
        norm = torch.stack([each.norm() for each in want.values()]).norm()
        assert torch.stack([(weights[key] - each).norm() for key, each in want.items()]).norm() < 1e-5 * norm


def test_a_run_is_resumed_on_another_number_of_ranks(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder, out=str(tmp_path / "out"), checkpoint_every=STOP, keep=9)
    (_, _, output), _ = (of_rank[0] for of_rank in ranks.run(train, 2, [(wanted, True)]))
    said = re.search(r"--share-prefixes saves (\d+) of (\d+) tokens, (\d+)% of the time, at most\n", output)
    assert 3 / 7 < int(said[1]) / int(said[2]) < 3 / 4
    first = jobs.losses(wanted.out)
    shutil.rmtree(Path(wanted.out, "checkpoints", f"step-{STEPS:08d}"))
    one_rank = replace(wanted, resume="auto", samples_per_rank=8)
    assert jobs.run(1, one_rank) == [jobs.ENDED]
    assert jobs.losses(wanted.out) == pytest.approx(first, rel=1e-5)
    with pytest.raises(ValueError, match="--share-prefixes was True and is False"):
        require_same(one_rank.identity(1), replace(one_rank, share_prefixes=False).identity(1), where=tmp_path)


def test_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for balance in ("queue", "micro", "global", "local"):
        with pytest.raises(ValueError, match=f"--share-prefixes goes with --balance mini; it is {balance}"):
            options(folder, balance=balance)
    make_new_positions(monkeypatch)
    config_of("StableLm").save_pretrained(tmp_path)
    wanted = options(folder, init=str(tmp_path / "config.json"))
    how = {"longest": 16, "largest_token": 9, "rank": 1}
    build_model(replace(wanted, share_prefixes=False), None, **how)
    with pytest.raises(PackingUnsupported, match="--share-prefixes: StableLmForCausalLM does not pass on"):
        build_model(wanted, None, **how)
