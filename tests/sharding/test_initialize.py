"""First values: rank 0's for all ranks, modules' own initialisation on the meta device, and what memory that takes."""

from __future__ import annotations

import math
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from odc_triton import MixedPrecisionPolicy, full_parameters, fully_shard
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S
from tests.support.models import build
from tests.support.replicas import mesh_of

BF16 = torch.bfloat16


def anonymous_mb() -> float:
    """This process's private memory that is no file's: the heap is a file's, also while one rank alone maps it."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    # A scalar is sharded as a tensor of one element.
    got = {name: value.view_as(want[name]) for name, value in got.items()}
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def _rank_0_counts(rank: int, world: int, name: str, others: str, bf16: bool) -> tuple:
    if rank and others == "meta":
        with torch.device("meta"):
            model = build(name)
    else:
        model = build(name, seed=rank)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16 if bf16 else None))
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    return masters(model), dict(full_parameters(model)), buffers


def test_rank_0_counts() -> None:
    cases = [("conv", "seeded", False), ("conv", "meta", True), ("gpt2-tied", "meta", False), ("qwen2", "meta", True)]
    found = ranks.run_all(3, *((_rank_0_counts, *case) for case in cases))
    for (name, _, bf16), of_ranks in zip(cases, found, strict=True):
        model = build(name)
        want = {key: p.detach() for key, p in model.named_parameters()}
        for got, computed, buffers in of_ranks:
            assert_same({key: got[key] for key in want}, want)
            assert_same(computed, {key: value.to(BF16) if bf16 else value for key, value in want.items()})
            assert_same(buffers, dict(model.named_buffers()))


def shared_mappings() -> int:
    return sum("memfd:odc" in line for line in Path("/proc/self/maps").read_text().splitlines())


def _left_open(rank: int, world: int) -> tuple[int, int]:
    model = fully_shard(build("qwen2"), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    maps = shared_mappings()
    files = [
        path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and "memfd:odc" in str(path.readlink())
    ]
    del model
    return maps, len(files)


def test_memory_in_between_is_freed() -> None:
    """What stays is the heap's mapping, its descriptor within mmap, its locks, and rank 0's read-only descriptor."""
    assert ranks.run(_left_open, 2) == [(1, 3), (1, 2)]


class Assigning(nn.Linear):
    def reset_parameters(self) -> None:
        self.weight.data = torch.rand_like(self.weight)
        nn.init.zeros_(self.bias)


class Plain(nn.Module):
    """Modules that initialise themselves: a parent after its children, buffers, lists of weights, assigned data."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(2))
        self.lstm = nn.LSTM(6, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.LayerNorm(4)
        self.assigning = Assigning(4, 3)


def _on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def _initialised(rank: int, world: int, name: str, bf16: bool) -> tuple:
    model = _on_meta(Plain if name == "plain" else lambda: build(name))
    torch.manual_seed(11)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16 if bf16 else None))
    logits = None
    if name != "plain":
        logits = model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits.detach()
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    return masters(model), buffers, torch.rand(1).item(), logits


def _reference(name: str) -> nn.Module:
    """What plain torch makes of the seed. A transformers model's constructor draws torch's defaults first, so the
    seed is set before `initialize_weights`, which is all that runs for a model on the meta device."""
    torch.manual_seed(11)
    if name == "plain":
        return Plain()
    model = build(name)
    tied = name.endswith("tied")
    if tied:  # initialised before it is tied
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    for module in model.modules():
        module._is_hf_initialized = False
    torch.manual_seed(11)
    model.initialize_weights()
    if tied:
        model.tie_weights()
    return model


@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [("llama", False), ("qwen3-moe", False), ("qwen2", True)]),
        (3, [("plain", False), ("gpt2-tied", False), ("gpt2-tied", True)]),
    ],
)
def test_initialised_once(world: int, cases: list[tuple[str, bool]]) -> None:
    found = ranks.run_all(world, *((_initialised, *case) for case in cases))
    for (name, bf16), of_ranks in zip(cases, found, strict=True):
        model = _reference(name)
        want = {key: p.detach() for key, p in model.named_parameters()}
        drawn = torch.rand(1).item()
        for got, buffers, next_drawn, logits in of_ranks:
            assert_same({key: got[key] for key in want}, want)
            assert_same(buffers, dict(model.named_buffers()))
            assert next_drawn == drawn  # ranks with one random state keep one: a shuffle is the same on all of them
            if logits is not None and not bf16:
                expected = model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits
                torch.testing.assert_close(logits, expected, rtol=0, atol=0)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(5, 2))
        self.register_buffer("table", torch.ones(4))


def _unknown(rank: int, world: int) -> tuple:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = fully_shard(_on_meta(Unknown))
    return masters(model), model.table.clone(), [str(warning.message) for warning in caught]


def _partly(rank: int, world: int) -> tuple:
    model = _on_meta(Plain)
    if rank == 0:
        linear, norm = model.blocks[0]
        linear.weight = nn.Parameter(torch.full((6, 6), 7.0))
        norm.running_mean = torch.full((6,), 8.0)
    fully_shard(model)
    return masters(model), model.blocks[0][1].running_mean.clone()


def _bottom_up(rank: int, world: int) -> tuple:
    """The initialiser of a block is in the model above, which a call on the block can't see."""
    model = _on_meta(lambda: build("qwen2"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for block in model.model.layers:
            fully_shard(block)
    fully_shard(model)
    return masters(model), len(caught)


class Wrapper(nn.Module):
    """A transformers model with a head of plain torch, as reward and value models are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("qwen2")
        self.value = nn.Linear(97, 1)


def _wrapped(rank: int, world: int) -> dict[str, torch.Tensor]:
    return masters(fully_shard(_on_meta(Wrapper)))


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.weight = nn.Parameter(torch.empty(3, 3))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.copy_(self.blocks[1].weight)


def _reading(rank: int, world: int) -> dict[str, torch.Tensor]:
    return masters(fully_shard(_on_meta(Reading), mp_policy=MixedPrecisionPolicy(param_dtype=BF16)))


def test_what_has_an_initialiser() -> None:
    unknown, partly, bottom_up, wrapped, reading = ranks.run_all(2, _unknown, _partly, _bottom_up, _wrapped, _reading)
    for rank, (values, table, texts) in enumerate(unknown):
        assert values["scale"].isnan().all()
        assert table.isnan().all()
        assert not values["known.weight"].isnan().any()
        assert len(texts) == (rank == 0)
        assert not texts or "2 tensors hold NaN until loaded" in texts[0]
        assert not texts or ("scale" in texts[0] and "table" in texts[0])
    for values, running_mean in partly:  # what rank 0 has is kept
        assert (values["blocks.0.0.weight"] == 7).all()
        assert (running_mean == 8).all()
        assert 0 < values["blocks.0.0.bias"].abs().max() < 1
        assert (values["blocks.0.1.weight"] == 1).all()
    for rank, (values, warned) in enumerate(bottom_up):
        assert warned == (2 if rank == 0 else 0)
        assert values["model.layers.0.mlp.up_proj.weight"].isnan().all()
        assert not values["model.embed_tokens.weight"].isnan().any()
    for values in wrapped:
        assert not any(value.isnan().any() for value in values.values())
        assert 0.015 < values["model.model.embed_tokens.weight"].std() < 0.025  # transformers' 0.02
        assert 0.03 < values["value.weight"].std() < 0.1  # torch's uniform, 1/sqrt(97) to both sides
    for values in reading:  # a parent may read its children's values, in the compute dtype
        assert torch.equal(values["weight"], values["blocks.1.weight"].to(BF16).float())


class Raising(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            raise ArithmeticError("a bad initialiser")


class Dying(nn.Linear):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            os.kill(os.getpid(), signal.SIGKILL)


def _failing(rank: int, world: int, kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    """The second block's initialiser fails, on rank 0, while the others wait for its values."""
    model = _on_meta(lambda: nn.Sequential(nn.ModuleList([nn.Linear(3, 3), kind(3, 3)]), nn.Linear(3, 3)))
    fully_shard(model, mesh=mesh_of(shape), mp_policy=MixedPrecisionPolicy(param_dtype=BF16), timeout=LONG_S)


def test_an_initialiser_that_raises_fails_on_every_rank() -> None:
    with ranks.start(_failing, 4, Raising, (2, 2)) as job:
        outcomes = job.join()
    assert outcomes[0].error_type == "ArithmeticError"
    for outcome in outcomes[1:]:
        assert outcome.error_type == "RanksDiffer"
        assert "rank 0 could not shard its model: ArithmeticError: a bad initialiser" in outcome.error


@pytest.mark.parametrize("shape", [(3,), slow((2, 2))])
def test_a_rank_that_dies_is_named(shape: tuple[int, ...]) -> None:
    with ranks.start(_failing, math.prod(shape), Dying, shape) as job:
        start_s = time.monotonic()
        for outcome in job.wait_for(list(range(1, math.prod(shape)))):
            assert outcome.error_type == "RankLost"
            assert "rank 0 died" in outcome.error
        assert time.monotonic() - start_s < LONG_S / 2  # found dead, not late


BLOCKS, WIDTH = 8, 1800  # 8 blocks of 13 MB: 104 MB
TOTAL_MB = BLOCKS * WIDTH * WIDTH * 4 / 2**20


class Measured(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.seen_mb, self.seen_mappings = anonymous_mb(), shared_mappings()


def _large() -> nn.Module:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Measured(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))

    return Stack()


def _memory(rank: int, world: int, meta: bool, bf16: bool) -> tuple[float, float, float]:
    fully_shard(nn.Linear(2, 2))  # what the first call imports is not counted
    empty_mb = anonymous_mb()
    model = _on_meta(_large) if meta or rank else _large()
    built_mb = anonymous_mb()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16 if bf16 else None))
    peak_mb = empty_mb
    if meta and rank == 0:
        peak_mb = max(block.seen_mb for block in model.blocks)
        assert len({block.seen_mappings for block in model.blocks}) == 1  # a block's is freed before the next one's
    return built_mb - empty_mb, peak_mb - empty_mb, anonymous_mb() - empty_mb


@pytest.mark.parametrize(("meta", "bf16"), [(False, True), slow(True, False), (True, True)])
def test_private_memory(meta: bool, bf16: bool) -> None:
    own_mb = TOTAL_MB / 2 if bf16 else 0  # a rank's master shard; without one the shard in the heap is the master
    for rank, (built_mb, peak_mb, final_mb) in enumerate(ranks.run(_memory, 2, meta, bf16)):
        if rank == 0 and not meta:
            assert built_mb > 0.9 * TOTAL_MB
        # One block and, where there is one, the master; 15 MB for what the allocator keeps.
        assert peak_mb < own_mb + TOTAL_MB / BLOCKS + 15
        assert final_mb < own_mb + 15
