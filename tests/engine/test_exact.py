"""Exact sums: the same bits whatever the order, right values, and no overflow that passes unseen."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
import random
import time
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import MinibatchToRepeat, full_parameters, fully_shard, minibatch, repeating
from odc_triton.engine.exact import ExactSum, ExactSums
from tests.support import ranks, slow
from tests.support.devices import OnGpu
from tests.support.gradients import gradients_of
from tests.support.models import CASES, build, microbatches
from tests.support.parity import DEALS, SIZES, TRANSFORMS, compare_each
from tests.support.replicas import mesh_of

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.floats(-4.0, 4.0, width=32)


def summed(exact: ExactSum, contributions: list[list[float]] | list[torch.Tensor]) -> torch.Tensor:
    """The shard of integers after these contributions."""
    shard = torch.zeros(len(contributions[0]), dtype=torch.int64)
    for each in contributions:
        exact.additions += 1
        exact.add(shard, 0, torch.as_tensor(each))
    return shard


@given(st.lists(st.lists(NEAR, min_size=3, max_size=3), min_size=1, max_size=9), st.randoms())
def test_any_order_gives_the_same_integers_near_the_true_sum(contributions: list[list[float]], order: object) -> None:
    exact, other = ExactSum(), ExactSum()
    shard = summed(exact, contributions)
    shuffled = contributions[:]
    order.shuffle(shuffled)
    assert torch.equal(summed(other, shuffled), shard)
    assert exact.added() == other.added()
    landed = exact.value(shard, torch.empty(3))
    for place, got in enumerate(landed.tolist()):
        true = sum(Fraction(each[place]) for each in contributions)
        # Each contribution is cut off below 2^-38, the sum is rounded once to fp32.
        assert abs(Fraction(got) - true) <= len(contributions) * Fraction(1, 2**38) + abs(true) * Fraction(1, 2**24)


@given(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1, max_size=12), st.integers(-100, 100))
def test_a_sum_that_could_wrap_is_refused(contributions: list[list[float]], exponent: int) -> None:
    exact = ExactSum()
    exact.exponent = exponent
    shard = summed(exact, contributions)
    refused = exact.settle([exact.added()])
    scaled = [[Fraction(x) * Fraction(2) ** exponent for x in each] for each in contributions]
    if refused is None or "bits of 62" not in refused:
        for place in range(2):
            assert sum(abs(each[place]) for each in scaled) < 2**62
            assert int(shard[place]) == sum(int(each[place]) for each in scaled)
    else:
        assert len(contributions) * max(abs(x) for each in scaled for x in each) >= 2**61


@given(st.lists(NEAR, min_size=1, max_size=20), st.lists(st.integers(0, 3), min_size=20, max_size=20))
def test_the_next_scale_does_not_depend_on_who_added_what(values: list[float], owners: list[int]) -> None:
    def next_exponent(dealt: list[list[float]]) -> int:
        told = []
        for mine in dealt:
            exact = ExactSum()
            if mine:
                summed(exact, [[value] for value in mine])
            told.append(exact.added())
        last = ExactSum()
        last.settle(told)
        return last.next_exponent

    spread = [[value for value, owner in zip(values, owners, strict=False) if owner == rank] for rank in range(4)]
    assert next_exponent(spread) == next_exponent([values])


def test_scales_follow_the_gradients() -> None:
    exact, told = ExactSum(), []
    for size in (1e-6, 1e-6, 1e-3, 1e3, 0.0, 1e3):
        exact.clear()
        shard = summed(exact, [[size, -size / 3], [size, size]])
        told.append(exact.settle([exact.added()]))
        if told[-1] is None:
            value = exact.value(shard, torch.empty(2)).tolist()
            assert value == pytest.approx([2 * size, size * 2 / 3], rel=1e-6)
    # The guess is too coarse for 1e-6; there is room to grow 2^8 times and not 1e3 times; 0 tells nothing.
    assert [None if text is None else text.split(" bits")[0] for text in told] == [
        "its sum has 20",
        None,
        "its sum might need 64",
        "its sum might need 73",
        None,
        None,
    ]


def test_only_a_first_sum_must_have_so_many_bits() -> None:
    exact = ExactSum()
    assert "a first one must have 30" in exact.settle([(1, 29)])
    exact.clear()
    assert exact.settle([(1, 54)]) is None  # when it is repeated
    exact.clear()
    assert exact.settle([(1, 29)]) is None, "gradients may become small later"


def test_what_is_not_finite_is_told_and_not_added() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        exact = ExactSum()
        shard = summed(exact, [[1.0, bad], [1.0, 1.0]])
        assert exact.added() == (2, None)
        assert shard.tolist() == [0, 0]


def test_rows_by_index_and_more_than_a_block() -> None:
    exact, shard = ExactSum(), torch.zeros(5, 2, dtype=torch.int64)
    exact.add(shard, torch.tensor([3, 0, 3]), torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]]))
    assert (shard / 2**38).tolist() == [[4, 8], [0, 0], [0, 0], [17, 34], [0, 0]]
    assert exact.additions == 3
    with pytest.raises(ValueError, match=r"would wait for the GPU .* add them by a kernel"):
        exact.add(torch.zeros(2, dtype=torch.int64), 0, torch.ones(2).as_subclass(OnGpu))
    many, values = torch.zeros(200_003, dtype=torch.int64), torch.randn(200_003)
    exact.add(many, 0, values.bfloat16())
    assert torch.equal(many, (values.bfloat16().double() * 2**38).round().long())
    assert torch.equal(exact.value(many, many.view(torch.float32)[:200_003]), values.bfloat16().float())


@pytest.mark.parametrize(
    ("runs", "world", "style", "backend"),
    [
        ([("gpt2-tied", "none"), ("qwen3-moe", "none"), ("conv", "none"), ("qwen3", "layers")], 3, "root", "cpu"),
        ([("qwen2", "frozen+checkpointing")], 2, "root", "cpu-sharded"),
        ([("qwen2", "none")], 2, "bottom-up", "cpu-sharded"),
        slow([("qwen3", "layers")], 2, "root", "cpu-interpreter"),
        slow([("qwen3", "direct")], 2, "root", "cpu-interpreter"),
    ],
)
def test_as_plain_torch(runs: list[tuple[str, str]], world: int, style: str, backend: str) -> None:
    compare_each(runs, world, style=style, backend=backend, steps=2, exact=True)


def _digest(model: nn.Module) -> str:
    made = hashlib.sha256()
    for name, weight in full_parameters(model):
        made.update(name.encode() + weight.contiguous().numpy().tobytes())
    return made.hexdigest()


def _late(
    rank: int, world: int, name: str, replicas: int, transform: str, backend: str, seed: int, steps: int
) -> tuple[dict[str, torch.Tensor], str, int]:
    """Trains with random delays. The first gradients, a digest of all weights, how many minibatches were repeated."""
    case, model = CASES[name], build(name)
    TRANSFORMS[transform](model)
    mesh = mesh_of((replicas, world // replicas)) if replicas > 1 else None
    fully_shard(model, mesh=mesh, backend=backend, exact=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    delay, repeated, first = random.Random(seed * 10 + rank), [], {}
    for step in range(steps):
        batches = microbatches(name, SIZES, seed=step)
        mine = [batches[index] for index in DEALS[world][rank]]

        def run(mine: list = mine) -> None:
            with minibatch(model, tokens=sum(case.count(batch) for batch in mine)) as mb:
                for batch in mine:
                    time.sleep(delay.random() * 0.02)
                    (case.loss(model, batch) / mb.tokens).backward()

        repeating(run, repeated.append)
        first = first or gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
    return first, _digest(model), len(repeated)


@pytest.mark.parametrize(
    ("name", "world", "transform", "backends", "steps"),
    [
        ("qwen2", 3, "none", ["cpu", "cpu-sharded"], 3),
        slow("qwen3", 2, "layers", ["cpu", "cpu"], 3),
        slow("qwen2", 4, "checkpointing", ["cpu"] * 3, 10),
        slow("qwen3", 2, "direct", ["cpu-interpreter"] * 2, 3),
    ],
)
def test_the_same_bits_in_every_run(name: str, world: int, transform: str, backends: list[str], steps: int) -> None:
    """And where shards lie apart, as who owns what and where it lies doesn't matter; replaced layers run on one."""
    calls = [(_late, name, 1, transform, backend, seed, steps) for seed, backend in enumerate(backends)]
    found = [outcome for of_ranks in ranks.run_all(world, *calls) for outcome in of_ranks]
    assert len({digest for _, digest, _ in found}) == 1
    assert len({repeated for *_, repeated in found}) == 1  # once for the first minibatch's guesses, or never


@pytest.mark.parametrize("name", ["qwen2", slow("conv")])
def test_the_same_gradients_on_any_number_of_ranks(name: str) -> None:
    want, *_ = ranks.run(_late, 1, name, 1, "none", "cpu", 0, 1)[0]
    for world, replicas, backend in ((2, 1, "cpu-interpreter"), (3, 1, "cpu"), (4, 2, "cpu")):
        for found, *_ in ranks.run(_late, world, name, replicas, "none", backend, world, 1):
            torch.testing.assert_close(found, want, rtol=0, atol=0)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum() * self.scalar


def _failures(rank: int, world: int, backend: str) -> dict[str, object]:
    model, said = fully_shard(Times(), backend=backend, exact=True), {}

    def one(size: float) -> object:
        try:
            with minibatch(model, tokens=1) as mb:
                (model(torch.full((5,), size)) / mb.tokens).backward()
        except MinibatchToRepeat as error:
            has_gradients = any(p.grad is not None for p in model.parameters())
            survives = str(pickle.loads(pickle.dumps(error))) == str(error)
            return sorted(error.parameters), has_gradients, survives
        found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        model.zero_grad()
        return found["weight"].tolist(), found["scalar"].item()

    said["first"] = one(1.0)
    said["ten thousand times as much"] = one(1e4)
    said["again"] = one(1e4)
    said["not finite"] = one(math.inf if rank == 0 else 1.0)
    said["after it"] = one(1e4)
    return said


def test_failures_are_told_to_all_ranks() -> None:
    by_backend = ranks.run_all(2, (_failures, "cpu"), (_failures, "cpu-interpreter"))
    for said in (said for of_ranks in by_backend for said in of_ranks):
        assert said["first"] == ([2.0] * 5, 5.0)
        assert said["ten thousand times as much"] == (["scalar", "weight"], False, True)
        assert said["again"] == ([2e4] * 5, 5e4)
        weight, scalar = said["not finite"]
        assert all(map(math.isnan, [*weight, scalar]))
        assert said["after it"] == ([2e4] * 5, 5e4)


def test_a_checkpoint_has_the_scales_of_the_next_sums() -> None:
    def one(model: nn.Module, size: float) -> list[int]:
        with minibatch(model):
            model(torch.full((5,), size)).backward()
        model.zero_grad()
        return [each.exponent for each in sums_of(model)._sums().values()]

    def sums_of(model: nn.Module) -> ExactSums:
        return model._odc_engine.participant(ExactSums)

    goes_on, resumed = fully_shard(Times(), exact=True), fully_shard(Times(), exact=True)
    first = one(goes_on, 1.0)
    sums_of(resumed).restore(json.loads(json.dumps(sums_of(goes_on).state())))
    second = one(goes_on, 3.0)
    assert second != first
    assert one(resumed, 3.0) == second


def test_only_three_repetitions() -> None:
    runs, seen = [], []

    def run() -> None:
        seen.append(torch.rand(()).item())
        runs.append(len(runs))
        raise MinibatchToRepeat(7, {"a.weight": "its sum might need 63 bits of 62"})

    with pytest.raises(MinibatchToRepeat, match=r"minibatch 7 must be run again .*\(a.weight: its sum might need 63"):
        repeating(run)
    assert len(runs) == 4
    assert len(set(seen)) == 1, "each repetition finds the same random state"


def test_what_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="weight is float64, and exact sums have 54 bits"):
        fully_shard(Times().double(), exact=True)
    with pytest.raises(ValueError, match=r"reduce_dtype=torch.float32 and exact sums are int64: leave one of them out"):
        fully_shard(Times(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32), exact=True)
    with pytest.raises(TypeError, match="exact is 'yes'; give True, False or None"):
        fully_shard(Times(), exact="yes")
    blocks = nn.Sequential(Times(), Times())
    fully_shard(blocks[0])
    with pytest.raises(ValueError, match="0 was sharded with exact=False, and its root would be with exact=True"):
        fully_shard(blocks, exact=True)


def test_deterministic_algorithms_choose_it() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        model = fully_shard(Times())
        plain = fully_shard(Times(), exact=False)
        with minibatch(model) as _:
            model(torch.ones(5)).backward()
        with pytest.raises(RuntimeError, match=r"came after fully_shard.*set it before, or give .*exact=True"):
            minibatch(plain).__enter__()
    finally:
        torch.use_deterministic_algorithms(False)
    assert model._odc_engine.deterministic
    assert model.weight.grad.full_tensor().tolist() == [2.0] * 5
