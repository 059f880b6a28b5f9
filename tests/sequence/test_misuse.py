"""Calls that once gave wrong gradients without a word, or a wrong error: refused by name, or right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from odc_triton import MinibatchFailed, enable_split, fully_shard, minibatch, split_forward
from odc_triton.balance import count_target_tokens
from odc_triton.base.errors import PeerFailed
from odc_triton.hf import summed_loss
from tests.support import ranks
from tests.support.families import make_new_positions
from tests.support.refusals import caught
from tests.support.splitting import Setup, build, packs_of, plain, require_plain, sharded, step_on

SETUP = Setup(deal="two")


def _is_right(found: dict[str, torch.Tensor], setup: Setup = SETUP) -> None:
    require_plain(found, replace(setup, deal="two", backend="cpu", compiler=""))


def _minibatch(model: torch.nn.Module, rank: int, body: Callable, setup: Setup = SETUP) -> str:
    """What a minibatch with `body(pack, tokens)` for each pack said; then whether a right one follows."""
    packs, said = packs_of(setup, rank), "nothing"
    try:
        with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
            for pack in packs:
                body(pack, mb.tokens)
    except MinibatchFailed as error:
        said = str(error)
    model.zero_grad()
    _is_right(step_on(model, setup, rank)[1], setup)
    return said


def _twice(rank: int, world: int, how: str) -> str:
    setup = replace(SETUP, backend="cpu-sharded")
    model = sharded(setup, rank)

    def body(pack: dict, tokens: int) -> None:
        loss = summed_loss(model, pack) / tokens
        if how == "pack":
            loss.backward()
            loss = summed_loss(model, pack) / tokens
        else:
            with torch.no_grad():
                summed_loss(model, pack)
        loss.backward()

    return _minibatch(model, rank, body, setup)


def _reference_first(rank: int, world: int) -> str:
    setup = replace(SETUP, family="Llama", change="lora")
    model = sharded(setup, rank)

    def body(pack: dict, tokens: int) -> None:
        with torch.no_grad(), model.disable_adapter():
            summed_loss(model, pack)
        (summed_loss(model, pack) / tokens).backward()

    return _minibatch(model, rank, body, setup)


def _inside_of_each_other(rank: int, world: int) -> str:
    model = sharded(SETUP, rank)
    packs = packs_of(SETUP, rank)

    def nested() -> None:
        with torch.no_grad(), split_forward(model, packs.split), torch.enable_grad():
            step_on(model, SETUP, rank)

    said = caught(nested)
    model.zero_grad()
    _is_right(step_on(model, SETUP, rank)[1])
    return said


def _attention_frozen(rank: int, world: int, trained: str) -> str:
    """Keys and values without gradients need no backward."""
    model = build(SETUP, replaced=True).requires_grad_(False)
    model.get_parameter(trained).requires_grad_(True)
    model = fully_shard(model)
    enable_split(model, tokens=48)
    _, found = step_on(model, SETUP, rank)
    assert list(found) == [trained]
    torch.testing.assert_close(found[trained], plain(SETUP)[1][trained], rtol=1e-4, atol=1e-6)
    return "right"


def _left_out(rank: int, world: int) -> str:
    """Rank 0 runs no pack; the other needs its segments."""
    model = sharded(SETUP, rank)
    packs = packs_of(SETUP, rank)
    said = "nothing"
    try:
        with torch.no_grad(), split_forward(model, packs.split):
            for pack in packs[: 0 if rank == 0 else None]:
                summed_loss(model, pack)
    except PeerFailed as error:
        said = "were not computed" if error.ranks == [0] else str(error)
    except RuntimeError as error:
        said = str(error)
    _is_right(step_on(model, SETUP, rank)[1])
    return said


def _without_plan(rank: int, world: int) -> str:
    model = sharded(SETUP, rank)
    packs = packs_of(SETUP, rank, deal=[[[0, 1]], [[2, 3]]])
    assert packs.split is None
    with torch.no_grad(), split_forward(model, packs.split):
        for pack in packs:
            summed_loss(model, pack)
    _is_right(step_on(model, SETUP, rank)[1])
    return "right"


def _not_checkpointed(rank: int, world: int) -> str:
    setup = replace(SETUP, in_flight=1)
    model = sharded(setup, rank)

    def body(pack: dict, tokens: int) -> None:
        loss = summed_loss(model, pack) / tokens
        model.gradient_checkpointing_enable()  # for the next minibatch
        loss.backward()

    return _minibatch(model, rank, body, setup)


def _layers_in_one_checkpoint(rank: int, world: int, in_flight: int) -> str:
    setup = replace(SETUP, in_flight=in_flight)
    model = sharded(setup, rank)

    said = "nothing"
    try:
        _is_right(step_on(model, setup, rank, loss_of=partial(checkpoint, summed_loss, use_reentrant=False))[1], setup)
    except MinibatchFailed as error:
        said = str(error)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    _is_right(step_on(model, setup, rank)[1], setup)
    return said


def _compiled_later(rank: int, world: int) -> str:
    model = sharded(SETUP, rank)
    if rank == 1:  # which reads of the other, and adds to it
        model.model.layers[1].compile(backend="eager")
    for _ in range(2):
        _is_right(step_on(model, SETUP, rank)[1])
        model.zero_grad()
    return "right"


CALLS = [
    ((_twice, "pack"), "were computed before"),
    ((_twice, "no_grad"), "were computed before"),
    ((_reference_first,), "were computed before"),
    ((_inside_of_each_other,), "inside split_forward"),
    ((_attention_frozen, "model.layers.1.self_attn.q_proj.weight"), "right"),
    ((_left_out,), "were not computed"),
    ((_without_plan,), "right"),
    ((_compiled_later,), "right"),
    ((_not_checkpointed,), "was not computed again in the backward of tokens"),
    ((_layers_in_one_checkpoint, 1), "layer 0 is computed again before the backward of layer 1"),
    ((_layers_in_one_checkpoint, 2), "nothing"),
]


def test_calls_are_refused_or_right() -> None:
    for (call, words), of_ranks in zip(CALLS, ranks.run_all(2, *(call for call, _ in CALLS)), strict=True):
        for said in of_ranks:
            assert words in said, f"{call}: {said}"


def _autocast(rank: int, world: int, family: str, backend: str, where: str) -> float:
    setup = Setup(deal="zigzag", family=family, backend=backend)
    cast = torch.autocast("cpu", dtype=torch.bfloat16)
    model = fully_shard(build(setup, replaced=True), backend=backend)
    with cast if where == "enable" else contextlib.nullcontext():
        enable_split(model, tokens=48)

    def loss_of(model: torch.nn.Module, pack: dict) -> torch.Tensor:
        with cast if where == "train" else contextlib.nullcontext():
            return summed_loss(model, pack)

    _, found = step_on(model, setup, rank, loss_of=loss_of)
    want = plain(replace(setup, deal="two", backend="cpu"))[1]
    off = sum((found[name] - want[name]).norm() ** 2 for name in want) / sum(each.norm() ** 2 for each in want.values())
    return off.sqrt().item()


def test_autocast() -> None:
    cases = [("Mistral", "cpu", "enable"), ("Qwen2", "cpu-sharded", "train")]
    for case, offs in zip(cases, ranks.run_all(3, *((_autocast, *case) for case in cases)), strict=True):
        assert max(offs) < (3e-2 if case[-1] == "train" else 1e-5), case


def test_layers_that_do_not_tell_attention_of_segments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_new_positions(monkeypatch)
    model = build(Setup(family="StableLm"), replaced=False)
    with pytest.raises(NotImplementedError, match=r"StableLmAttention is not told which documents are segments"):
        enable_split(fully_shard(model), tokens=8)


def test_another_attention_would_ignore_segments() -> None:
    model = build(SETUP, replaced=False)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"call odc_triton.hf.enable_packing\(model\) before fully_shard"):
        summed_loss(model, packs_of(SETUP, 0)[0])


def test_modules_stay_in_their_mode() -> None:
    model = fully_shard(build(SETUP, replaced=False))
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert True in modes
    enable_split(model, tokens=8)
    assert [module.training for module in model.modules()] == modes
