"""Calls that once gave wrong gradients without a word, or a wrong error: refused by name, or right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.support import ranks, slow
from tests.support.splitting import Setup, build, packs_of, plain, sharded, step_on

SETUP = Setup(deal="two")


def _is_right(found: dict[str, torch.Tensor], setup: Setup = SETUP, tolerance: float = 1e-5) -> None:
    want = plain(replace(setup, deal="two", backend="cpu"))[1]
    assert found.keys() == want.keys()
    for name, gradient in want.items():
        assert (found[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-2 * tolerance, name


def _minibatch(model: torch.nn.Module, rank: int, body: Callable, setup: Setup = SETUP) -> str:
    """What a minibatch with `body(pack, tokens)` for each pack said; then whether a right one follows."""
    from odc_triton import MinibatchFailed, minibatch
    from odc_triton.balance import count_target_tokens

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


def _twice(rank: int, world: int, how: str, backend: str) -> str:
    from odc_triton.hf import summed_loss

    setup = replace(SETUP, backend=backend)
    model = sharded(setup, rank)

    def body(pack: dict, tokens: int) -> None:
        loss = summed_loss(model, pack) / tokens
        if how == "backward":
            loss.backward(retain_graph=True)
        elif how == "pack":
            loss.backward()
            loss = summed_loss(model, pack) / tokens
        else:
            with torch.no_grad():
                summed_loss(model, pack)
        loss.backward()

    return _minibatch(model, rank, body, setup)


@pytest.mark.parametrize("backend", ["cpu-apart", slow("cpu")])
@pytest.mark.parametrize("how", ["backward", "pack", "no_grad"])
def test_a_second_time_is_refused(how: str, backend: str) -> None:
    words = "had a backward already" if how == "backward" else "were computed before"
    for said in ranks.run(_twice, 2, how, backend):
        assert words in said, said


def _reference_first(rank: int, world: int) -> str:
    from odc_triton.hf import summed_loss

    setup = replace(SETUP, family="Llama", change="lora")
    model = sharded(setup, rank)

    def body(pack: dict, tokens: int) -> None:
        with torch.no_grad(), model.disable_adapter():
            summed_loss(model, pack)
        (summed_loss(model, pack) / tokens).backward()

    return _minibatch(model, rank, body, setup)


def test_a_reference_forward_of_the_same_pack_is_refused() -> None:
    for said in ranks.run(_reference_first, 2):
        assert "were computed before" in said, said


def _only_the_first_layer(rank: int, world: int) -> str:
    from odc_triton.hf import model_inputs, summed_loss

    model = sharded(SETUP, rank)

    def body(pack: dict, tokens: int) -> None:
        if rank == 0 and "pieces" in pack:
            hidden = model(**model_inputs(pack, model), output_hidden_states=True).hidden_states[1]
            hidden.sum().backward()
        else:
            (summed_loss(model, pack) / tokens).backward()

    return _minibatch(model, rank, body)


def test_a_backward_through_some_layers_is_refused() -> None:
    for said in ranks.run(_only_the_first_layer, 2):
        assert "had no backward" in said, said


def _attention_frozen(rank: int, world: int, trained: str) -> None:
    from odc_triton import enable_split, fully_shard

    model = build(SETUP, replaced=True).requires_grad_(False)
    model.get_parameter(trained).requires_grad_(True)
    model = fully_shard(model)
    enable_split(model, tokens=48)
    _, found = step_on(model, SETUP, rank)
    assert list(found) == [trained]
    torch.testing.assert_close(found[trained], plain(SETUP)[1][trained], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trained", ["lm_head.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_keys_and_values_without_gradients_need_no_backward(trained: str) -> None:
    ranks.run(_attention_frozen, 2, trained)


def test_plans_of_other_waves_differ() -> None:
    from odc_triton.balance.pieces import Piece, SplitPlan

    a, b = [Piece(0, 0, 5)], [Piece(1, 0, 5)]
    c, d = [Piece(0, 5, 9)], [Piece(1, 5, 9)]
    assert SplitPlan.of([[a, b], [c, d]]).digest != SplitPlan.of([[b, a], [d, c]]).digest


def _without_plan(rank: int, world: int) -> None:
    from odc_triton import split_forward
    from odc_triton.hf import summed_loss

    model = sharded(SETUP, rank)
    whole = [[[0, 1]], [[2, 3]]]
    packs = packs_of(SETUP, rank, deal=whole)
    assert packs.split is None
    with torch.no_grad(), split_forward(model, packs.split):
        for pack in packs:
            summed_loss(model, pack)
    _is_right(step_on(model, SETUP, rank)[1])


def test_split_forward_without_pieces() -> None:
    ranks.run(_without_plan, 2)


def _inside_of_each_other(rank: int, world: int) -> str:
    from odc_triton import split_forward

    model = sharded(SETUP, rank)
    packs = packs_of(SETUP, rank)
    try:
        with torch.no_grad(), split_forward(model, packs.split), torch.enable_grad():
            step_on(model, SETUP, rank)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    model.zero_grad()
    _is_right(step_on(model, SETUP, rank)[1])
    return said


def test_a_minibatch_inside_of_split_forward_is_refused() -> None:
    for said in ranks.run(_inside_of_each_other, 2):
        assert "inside split_forward" in said, said


def _autocast(rank: int, world: int, family: str, backend: str, where: str) -> float:
    from odc_triton import enable_split, fully_shard
    from odc_triton.hf import summed_loss

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


@pytest.mark.parametrize("where", ["train", "enable"])
@pytest.mark.parametrize("backend", ["cpu", "cpu-apart"])
@pytest.mark.parametrize("family", ["Qwen2", "Mistral"])
def test_autocast(family: str, backend: str, where: str) -> None:
    for off in ranks.run(_autocast, 3, family, backend, where):
        assert off < (3e-2 if where == "train" else 1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_pack_are_refused(kind: str) -> None:
    from odc_triton import enable_split, fully_shard

    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 24}
    setup = Setup(family="Llama", sizes=(("rope_parameters", rope),))
    model = build(setup, replaced=False)
    with pytest.raises(NotImplementedError, match="rotary"):
        enable_split(fully_shard(model), tokens=8)


def test_layers_that_do_not_tell_attention_of_pieces_are_refused() -> None:
    from odc_triton import enable_split, fully_shard

    model = build(Setup(family="StableLm"), replaced=False)
    with pytest.raises(NotImplementedError, match=r"StableLmAttention is not told which documents are pieces"):
        enable_split(fully_shard(model), tokens=8)


def _compiled_later(rank: int, world: int) -> None:
    model = sharded(SETUP, rank)
    model.model.layers[1].compile(backend="eager")
    for _ in range(2):
        _is_right(step_on(model, SETUP, rank)[1])
        model.zero_grad()


def test_blocks_that_are_compiled_later() -> None:
    ranks.run(_compiled_later, 2)


def test_another_attention_would_ignore_pieces() -> None:
    from odc_triton.hf import summed_loss

    model = build(SETUP, replaced=False)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"call odc_triton.hf.enable_packing\(model\) before fully_shard"):
        summed_loss(model, packs_of(SETUP, 0)[0])


def test_modules_stay_in_their_mode() -> None:
    from odc_triton import enable_split, fully_shard

    model = fully_shard(build(SETUP, replaced=False))
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    assert True in modes
    enable_split(model, tokens=8)
    assert [module.training for module in model.modules()] == modes
