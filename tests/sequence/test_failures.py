"""What goes wrong while ranks compute pieces of a sample: every rank hears the cause, and the next minibatch works."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from odc_triton import MinibatchFailed, enable_split, fully_shard, memory_plan, minibatch
from odc_triton.balance import count_target_tokens, pack_collate
from odc_triton.balance.pieces import Piece, SplitPlan
from odc_triton.balance.pieces import Piece as P
from odc_triton.base.errors import OfRanks
from odc_triton.comm.memory.heap import PID
from odc_triton.hf import summed_loss
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.sequence.sync import KernelSync, ShownWaits
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S, SHORT_S
from tests.support.refusals import caught
from tests.support.splitting import (
    DEALS,
    Dealt,
    Setup,
    build,
    gradients,
    packs_of,
    plain,
    raises_in_forward,
    samples,
    sharded,
    step_on,
)

SETUP = Setup(deal="zigzag")


def _right_after(model: torch.nn.Module, rank: int) -> None:
    """One more minibatch is as if nothing had been."""
    model.zero_grad()
    _, found = step_on(model, SETUP, rank)
    for name, want in plain(Setup())[1].items():
        assert (found[name] - want).norm() <= 1e-5 * want.norm() + 1e-7, name


# ------------------------------------------------------------------ a microbatch goes wrong on one rank


def _constant(model: torch.nn.Module, pack: dict) -> torch.Tensor:

    return summed_loss(model, pack).detach() * torch.ones((), requires_grad=True)


def _fails_once(rank: int, world: int, fault: str, backend: str) -> str:
    model = sharded(replace(SETUP, backend=backend), rank)
    packs, start_s = packs_of(SETUP, rank), time.monotonic()
    try:
        with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
            for number, pack in enumerate(packs):
                loss_of: Callable = summed_loss
                if rank == 1 and number == 0:
                    if fault == "skipped":
                        continue
                    loss_of = _constant if fault == "constant" else raises_in_forward
                (loss_of(model, pack) / mb.tokens).backward()
        said = "nothing"
    except MinibatchFailed as error:
        said = str(error)
    assert time.monotonic() - start_s < LONG_S / 2
    _right_after(model, rank)
    return said


FAULTS = [
    ("raised", "cpu", "rank 1: OutOfMemoryError: no memory for 3 GiB"),
    ("constant", "cpu", "rank 1: RuntimeError: tokens 8..19 of sample 0 had no backward, and other ranks wait for it"),
    (
        "skipped",
        "cpu-interpreter",
        "rank 1: RuntimeError: tokens 8..19 of sample 0 were not computed, and other ranks need them",
    ),
]


def test_every_rank_hears_the_cause_alone() -> None:
    found = ranks.run_all(3, *((_fails_once, fault, backend) for fault, backend, _ in FAULTS))
    for (*_, words), of_ranks in zip(FAULTS, found, strict=True):
        for said in of_ranks:
            assert words in said
            assert said.count("rank ") - said.count("ranks") - said.count("other rank") <= 2, said
            assert "PeerFailed" not in said


# ------------------------------------------------------------------ a rank is gone or stands still


def _ends_in(where: str, number: int, at_layer: int = 1) -> None:
    """This rank's process gets that signal when it publishes (in its forward) or adds (in its backward)."""
    own = getattr(SequenceExchange, where)

    def dies(self: SequenceExchange, layer: int, *rest: Any) -> Any:
        if layer == at_layer:
            os.kill(os.getpid(), number)
        return own(self, layer, *rest)

    setattr(SequenceExchange, where, dies)


def _killed_after_the_deadline(rank: int, world: int, setup: Setup) -> tuple[str, list[int]]:
    """Rank 1 stops; when rank 0 has stopped waiting for it, and before it says why, rank 1 is killed."""
    model = fully_shard(build(setup, replaced=True), backend="cpu-interpreter", timeout=LONG_S)
    enable_split(model, tokens=48)
    heap, check = model._odc_engine.heap, KernelSync.check
    model._odc_engine.barrier.timeout_s = SHORT_S

    def check_later(self: KernelSync) -> None:
        if self._late_at_stop and heap.is_alive(1):
            os.kill(heap.seen(PID)[1], signal.SIGKILL)
            while heap.is_alive(1):
                time.sleep(0.01)
        check(self)

    if rank == 1:
        _ends_in("add", signal.SIGSTOP)
    KernelSync.check = check_later
    with pytest.raises(OfRanks) as caught:
        step_on(model, setup, rank)
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.ranks


@pytest.mark.slow
def test_a_rank_killed_after_the_deadline_is_lost() -> None:
    with ranks.start(_killed_after_the_deadline, 2, Setup(deal="two")) as job:
        (survivor,) = job.wait_for([0])
    said, blamed = survivor.value
    assert (said.split(":")[0], blamed) == ("RankLost", [1]), said


@dataclass(frozen=True, kw_only=True)
class Stop:
    """`victim` stops in layer `layer` when it is about to `where`."""

    deal: Dealt
    where: str
    victim: int
    layer: int = 1
    signal: int = signal.SIGSTOP


_BESIDE: Dealt = [[[P(0, 0, 24), 3]], [[P(0, 24, 41)]], [[1]]]  # rank 2 is at the exit soon
_BEHIND: Dealt = [[[P(2, 0, 10)]], [[P(2, 10, 30), P(0, 0, 13)]], [[P(0, 13, 41)]]]  # rank 2 needs rank 1's alone
STOPS = {
    "publishing, one at the exit": Stop(deal=_BESIDE, where="publish", victim=0),
    "adding, one at the exit": Stop(deal=_BESIDE, where="add", victim=1),
    "publishing, one behind another": Stop(deal=_BEHIND, where="publish", victim=0, layer=0),
    "adding, one behind another": Stop(deal=_BEHIND, where="add", victim=2),
    # It waits for rank 0, whose flag comes afterwards.
    "waiting": Stop(deal=_BESIDE, where="wait", victim=1),
}


def _stops(stop: Stop, rank: int) -> None:
    if stop.where != "wait":
        if rank == stop.victim:
            _ends_in(stop.where, stop.signal, stop.layer)
        return
    publish, show = SequenceExchange.publish, ShownWaits.show

    def publish_late(self: SequenceExchange, *given: Any) -> None:
        if rank != stop.victim:
            time.sleep(0.2)
        publish(self, *given)

    def show_and_stop(self: ShownWaits, *given: Any, **named: Any) -> None:
        show(self, *given, **named)
        if rank == stop.victim:
            os.kill(os.getpid(), signal.SIGSTOP)

    SequenceExchange.publish, ShownWaits.show = publish_late, show_and_stop


def _beside_one_that_stops(rank: int, world: int, stop: Stop, backend: str) -> tuple[str, list[int]]:
    model = fully_shard(build(SETUP, replaced=True), backend=backend, timeout=LONG_S)
    enable_split(model, tokens=48)
    if stop.signal == signal.SIGSTOP:
        model._odc_engine.barrier.timeout_s = SHORT_S
    _stops(stop, rank)
    with pytest.raises(OfRanks) as caught:
        step_on(model, SETUP, rank, deal=stop.deal)
    return f"{type(caught.value).__name__}: {caught.value}", caught.value.ranks


def _said_by_others(stop: Stop, backend: str) -> list[tuple[str, list[int]]]:
    """What the others than the victim said, and which ranks they blamed."""
    with ranks.start(_beside_one_that_stops, 3, stop, backend) as job:
        outcomes = job.wait_for([rank for rank in range(3) if rank != stop.victim])
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("publishing, one at the exit", "cpu"),
        slow("adding, one at the exit", "cpu"),
        ("adding, one behind another", "cpu"),
        slow("publishing, one behind another", "cpu-interpreter"),
        slow("waiting", "cpu"),
        ("waiting", "cpu-interpreter"),
    ],
)
def test_all_others_name_the_rank_that_stands_still_alone(name: str, backend: str) -> None:
    stop = STOPS[name]
    for said, blamed in _said_by_others(stop, backend):
        assert said.startswith("DeadlineExceeded: "), said
        assert blamed == [stop.victim], said
        assert re.search(rf"(for|of) rank {stop.victim}( at|$)", said), said


KILLS = {
    # One of the others waits for a rank that only waits for the killed one: on kernels its wait goes on until then.
    "adding, one behind another": (STOPS["adding, one behind another"], "cpu-interpreter", ""),
    "publishing, one behind another": (STOPS["publishing, one behind another"], "cpu-interpreter", ""),
    "publishing": (
        Stop(deal=DEALS["zigzag"], where="publish", victim=1),
        "cpu",
        r"keys and values of tokens 8\.\.19 of sample 0 in layer 1",
    ),
    "adding": (
        Stop(deal=DEALS["zigzag"], where="add", victim=1),
        "cpu-sharded",
        r"gradients of tokens \d+\.\.\d+ of sample 0 from tokens 8\.\.19 of sample 0 in layer 1",
    ),
}


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_rank_is_named(name: str) -> None:
    stop, backend, awaited = KILLS[name]
    start_s = time.monotonic()
    found = _said_by_others(replace(stop, signal=signal.SIGKILL), backend)
    assert time.monotonic() - start_s < LONG_S / 2
    for said, blamed in found:
        assert said.startswith("RankLost: "), said
        assert f"rank {stop.victim} died" in said, said
        assert blamed == [stop.victim], said
    assert any(re.search(awaited, said) for said, _ in found), found


# ------------------------------------------------------------------ wrong calls


def _wrong_calls(rank: int, world: int) -> dict[str, str]:
    plan = SplitPlan.of(DEALS["two"])
    packs = packs_of(Setup(), rank)
    said = {}

    def one(split: Any = None, pack: dict | None = None) -> None:
        with minibatch(model, tokens=1, split=split):
            if pack is not None:
                summed_loss(model, pack).backward()

    model = fully_shard(build(Setup(), replaced=True))
    said["no room"] = caught(lambda: one(split=plan))
    said["pieces, not enabled"] = caught(lambda: one(pack=packs[0]))
    said["tokens"] = caught(lambda: enable_split(model, tokens=0))
    said["ranks differ"] = caught(lambda: enable_split(model, tokens=20 + rank))
    enable_split(model, tokens=30)
    said["twice"] = caught(lambda: enable_split(model, tokens=30))
    said["pieces, no plan"] = caught(lambda: one(pack=packs[0]))
    said["another's pieces"] = caught(lambda: one(split=plan, pack=packs_of(Setup(), 1 - rank)[0]))
    said["no plan but a list"] = caught(lambda: one(split=[1]))
    said["for three ranks"] = caught(lambda: one(split=SplitPlan.of(DEALS["zigzag"])))
    many = SplitPlan.of([[[Piece(0, 0, 40)]], [[Piece(0, 40, 41)]]])
    said["too little room"] = caught(lambda: one(split=many))
    other = SplitPlan.of([[[Piece(0, 0, 20)]], [[Piece(0, 20, 41)]]])
    said["plans differ"] = caught(lambda: one(split=plan if rank else other))
    said["none on one"] = caught(lambda: one(split=plan if rank else None))
    # And after all of it a minibatch works.
    _, found = step_on(model, Setup(), rank)
    for name, want in plain(Setup())[1].items():
        assert (found[name] - want).norm() <= 1e-5 * want.norm() + 1e-7, name
    return said


WRONG = {
    "no room": "RuntimeError: this minibatch was given a split: call enable_split(model, tokens=…) after fully_shard",
    "pieces, not enabled": "this pack holds pieces of samples: call enable_split(model, tokens=…) after fully_shard",
    "tokens": "ValueError: tokens is 0; give the tokens per rank that others may read, 1 or more",
    "ranks differ": "RanksDiffer: enable_split: tokens is ",
    "twice": "ValueError: enable_split was called on this model before",
    "pieces, no plan": "and there is no plan: give it, minibatch(model, tokens=…, split=packs.split)",
    "another's pieces": "are not this rank's in the minibatch's plan",
    "no plan but a list": "TypeError: split is a list; give the packs' plan, packs.split",
    "for three ranks": "the plan is of 3 ranks; make it for the 2 ranks of this model",
    "too little room": "lets others read 40 tokens of rank 0, and there is room for 30: give enable_split(",
    "plans differ": "RanksDiffer: the ranks split sequences by 2 different plans",
    "none on one": "(none on rank 0, ",
}


def test_wrong_calls_are_told() -> None:
    for said in ranks.run(_wrong_calls, 2):
        assert said.keys() == WRONG.keys()
        for name, words in WRONG.items():
            assert words in said[name], f"{name}: {said[name]}"


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no packing", "no layer of Qwen2ForCausalLM attends by odc_triton's packed attention: call"),
        ("compiled", "model.layers.1 is compiled, which splitting does not support yet"),
    ],
)
def test_models_that_are_refused(change: str, words: str) -> None:
    model = build(Setup(), replaced=False)
    if change == "no packing":
        model.set_attn_implementation("sdpa")
    else:
        model.model.layers[1].compile()
    with pytest.raises(NotImplementedError, match=re.escape(words)):
        enable_split(fully_shard(model), tokens=8)
    with pytest.raises(TypeError, match="is not sharded"):
        enable_split(build(Setup(), replaced=False), tokens=8)


def test_the_plan_of_memory_is_what_is_allocated() -> None:
    model = build(Setup(), replaced=False)
    planned = memory_plan(model, 1, split_tokens=900)
    without = memory_plan(model, 1)
    assert planned.shared_bytes - without.shared_bytes == planned.split_bytes
    assert planned.job_shared_bytes - without.job_shared_bytes == planned.split_bytes
    enable_split(fully_shard(model), tokens=900)
    assert planned.split_bytes == pytest.approx(
        model._odc_engine.participant("split").buffers.heap.size_bytes, rel=0.01
    )
    assert "split sequences" in str(planned)
    assert "split sequences" not in str(without)
    with pytest.raises(ValueError, match="split_tokens is 9 for 'fsdp2'"):
        memory_plan(model, 1, scheme="fsdp2", split_tokens=9)


def test_without_pieces_nothing_changes() -> None:
    """On a model with `enable_split` a minibatch without a plan is as before, and generation too."""
    want = plain(Setup())[1]
    model = fully_shard(build(Setup(), replaced=False))
    enable_split(model, tokens=8)
    packs = pack_collate([[each] for each in samples(Setup())])
    with minibatch(model, tokens=sum(len(each["target_positions"]) for each in packs)) as mb:
        for pack in packs:
            (summed_loss(model, pack) / mb.tokens).backward()
    for name, got in gradients(model).items():
        torch.testing.assert_close(got, want[name], rtol=1e-5, atol=1e-7)
    assert not [event for event in model._odc_engine.events.drain() if "layer" in event.label]
    ids = samples(Setup())[1]["input_ids"][None]
    plain_model = build(Setup(), replaced=False)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain_model.generate(ids, **options))
