"""The baselines train alike, and the numbers of a report are what they say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from bench import demo
from bench.cut import cut
from bench.demo import COLUMNS, WARM_UP, in_words, make_report, rows_of
from bench.harness import Measured, Work, compare
from bench.variants import (
    Bridged,
    Ddp,
    Fsdp2,
    Fsdp2Micro,
    Fsdp2NoReshard,
    Fsdp2SymmetricMemory,
    LayerBarrier,
    Odc,
    OdcMicro,
    OdcSplit,
    Setting,
    Unsharded,
)
from odc_triton.base.events import Event
from odc_triton.jobs.reports.trace import barriers
from odc_triton.packs.collate import count_target_tokens, pack_collate
from tests.support import ranks
from tests.support.families import SIZES

CONFIG = SIZES | {"num_hidden_layers": 3}
ALL = (Fsdp2, Fsdp2Micro, Fsdp2NoReshard, Ddp, LayerBarrier, OdcMicro, Odc, Bridged)


def _packs(seed: int) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(0, 97, (n,), generator=generator) for n in (9, 4, 17, 6, 12, 5)]
    return pack_collate(
        [[{"input_ids": a}, {"input_ids": b}] for a, b in zip(documents[::2], documents[1::2], strict=True)]
    )


def _weights(model: torch.nn.Module) -> dict:
    from torch.distributed.tensor import DTensor

    values = {}
    for name, value in model.named_parameters():
        value = value.detach()
        values[name.removeprefix("module.")] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return values


def two_steps(rank: int, world: int, kinds: tuple[type, ...]) -> dict[type, tuple[dict, list[Event]]]:
    """Unequal counts where the variant allows it, equal ones where every rank must come as often."""
    work = Work(dataset="", config=CONFIG, minibatches=[], token_cap=128)
    found = {}
    for kind in kinds:
        variant = kind(work.build)
        equal = kind.balance != "mini"
        for step in range(2):
            packs = _packs(step)
            shares = [packs[:1] + packs[2:], packs[1:2] + packs[2:]] if equal else [packs[:1], packs[1:]]
            variant.start_minibatch(step)
            variant.gradients(shares[rank], sum(count_target_tokens(share) for share in shares))
            variant.step()
        found[kind] = _weights(variant.model), variant.events()
    return found


def test_fsdp2_without_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 has no such option: it is FSDP2 then, with NCCL as it comes."""
    monkeypatch.delattr(FSDPModule, "set_symm_mem_for_comm", raising=False)
    monkeypatch.delenv("NCCL_CTA_POLICY", raising=False)
    monkeypatch.setattr(Fsdp2, "shard", lambda self, model: model)
    variant, model = object.__new__(Fsdp2SymmetricMemory), torch.nn.Linear(1, 1)
    variant.setting = Setting(device="cuda")
    assert variant.shard(model) is model
    assert "NCCL_CTA_POLICY" not in os.environ


def alone(mini: bool) -> dict:
    torch.set_num_threads(1)
    work = Work(dataset="", config=CONFIG, minibatches=[], token_cap=128)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        variant = Unsharded(work.build)
        for step in range(2):
            packs = _packs(step) if mini else [*_packs(step), _packs(step)[2]]
            variant.gradients(packs, count_target_tokens(packs))
            variant.step()
    finally:
        torch.distributed.destroy_process_group()
    return _weights(variant.model)


@pytest.mark.slow
def test_variants_equal_unsharded() -> None:
    wanted = {mini: alone(mini) for mini in (True, False)}
    outcomes = ranks.run(two_steps, 2, ALL)
    for kind in ALL:
        want = wanted[kind.balance == "mini"]
        events = [event for found in outcomes for event in found[kind][1]]
        for weights in (found[kind][0] for found in outcomes):
            assert weights.keys() == want.keys()
            for name, value in want.items():
                # fp32 sums in another order, two AdamW steps of 3e-4
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5, msg=f"{kind.__name__}: {name}")
        assert {(event.rank, event.minibatch) for event in events} >= {(rank, k) for rank in (0, 1) for k in (0, 1)}
        count = len(barriers(events))
        if kind in (Odc, OdcMicro, OdcSplit, Bridged):
            assert count == 4, "two barriers per minibatch"
        elif kind is Fsdp2NoReshard:
            gathers = [event for event in events if event.label == "all-gather"]
            assert len(gathers) == 2 * 2 * (CONFIG["num_hidden_layers"] + 1), "once per unit, rank and minibatch"
        elif kind is not Ddp:
            assert count >= 2 * 2 * CONFIG["num_hidden_layers"]


def cut_text(path: Path, lengths: Sequence[int]) -> str:
    """A data set of samples of those lengths, all of whose tokens are learned."""
    cut(np.arange(sum(lengths)) * 7 % 97, lengths).save(path)
    return str(path)


def compared(rank: int, world: int, kinds: tuple, work: Work) -> list[Measured]:
    return compare(kinds, work)


def test_split_samples_train_as_whole_ones(tmp_path: Path) -> None:
    lengths, minibatches = (128, 20, 9, 12, 30, 128, 40, 40), [[0, 1], [2, 3, 4, 5], [6, 7]]
    dataset = cut_text(tmp_path / "data.npz", lengths)
    work = Work(dataset=dataset, config=CONFIG, minibatches=minibatches, token_cap=128)
    split, whole = ranks.run(compared, 2, (OdcSplit, Odc), work)[0]
    # fp32 sums in another order, and AdamW steps of 3e-4
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)


def _report(tmp_path: Path) -> dict:
    """As if every variant took its pace, on a quiet machine."""
    count = WARM_UP + 6
    work = Work(
        dataset=cut_text(tmp_path / "data.npz", (3, 4)), config=CONFIG, minibatches=[[0, 1]] * count, token_cap=128
    )
    pace = {Fsdp2: 2.0, Fsdp2NoReshard: 1.5, Odc: 1.2, OdcSplit: 1.0}
    results = []
    for kind, seconds in pace.items():
        result = Measured(name=kind.name, balance=kind.balance, seconds=[seconds] * count, losses=[3.0, 2.0] * count)
        result.step_seconds, result.microbatches = [0.1] * count, [[2, 2]] * count
        result.waited_s, result.repeats = [[0.0, 0.0]] * count, [0] * count
        result.events = [
            Event(rank=rank, kind=what, start_s=k * 10 + a, end_s=k * 10 + b, minibatch=k)
            for k in range(count)
            for rank in (0, 1)
            for what, a, b in (("forward", 0, 3), ("wait", 3, 4))
        ]
        results.append(result)
    memory = {kind.name: {"peak_private_bytes": 5, "shared_bytes": 9} for kind in pace}
    return make_report(results, memory, {"fraction": 0.01}, work, parameters=10)


def test_report_says_what_was_measured(tmp_path: Path) -> None:
    report = _report(tmp_path)
    assert report["speedup_vs_fsdp2"]["ratio"] == pytest.approx(2.0 / 1.2)
    assert report["speedup_vs_fastest"]["name"] == Fsdp2NoReshard.name
    assert report["speedup_vs_fastest"]["ratio"] == pytest.approx(1.5 / 1.2)
    assert report["speedup_split_vs_fastest"]["name"] == Odc.name
    assert report["speedup_split_vs_fastest"]["ratio"] == pytest.approx(1.2)
    assert not any("barrier" in key for key in report)
    assert report["idle_fraction"][Odc.name] == pytest.approx(0.25)
    assert report["loss_first"][Odc.name] == 3.0
    assert report["loss_last"][Odc.name] == 2.0
    assert report["loss_spread"] == 0
    assert report["tokens"] == 6 * 7
    assert "ODC + split is 1.20 times faster than the fastest of the others, ODC + LB-Mini" in in_words(report)
    rows = rows_of(report)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert [row[:3] for row in rows][-2:] == [[Odc.name, "1.20", "1.20x"], [OdcSplit.name, "1.00", ""]]
    assert report["disturbed"] == {"measured_anew": 0, "left": 0}
    assert "The machine was quiet" in in_words(report)
    assert "not quiet" not in demo.heading(report)
