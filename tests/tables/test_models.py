"""What each family of models does, on two ranks, against plain transformers in one process: docs/models.md."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support import ranks
from tests.support.families import FUSED, WIDE, class_of, config_of, wide
from tests.support.gradients import assert_same_gradients, gradients_of
from tests.support.hybrids import HYBRIDS, hybrid
from tests.support.splitting import Setup, packs_of, samples
from tests.support.table_models import COLUMNS, MODELS, TITLES, refusal

ROLES = {"replaces layers": "linear", FUSED: "attention", "fused head": "head"}
ON_RANKS = [column for column in COLUMNS if column != "simulate"]
CELLS = [(title, column) for title in TITLES for column in ON_RANKS]
Found = tuple[float, dict[str, torch.Tensor]]  # the loss, and gradients by name


def _is_packed(name: str, column: str) -> bool:
    """A model that can't be packed shows the other columns on one sample a microbatch."""
    return column in ("packs", "splits") or (column != "trains" and refusal(name, "packs") is None)


def _plain(name: str) -> nn.Module:
    return hybrid(name, dtype=torch.float32) if name in HYBRIDS else wide(name, "eager")


def _prepared(name: str, column: str) -> nn.Module:
    """The model as it is before `fully_shard`. Raises RuntimeError where no layer is replaced."""
    from odc_triton.hf import enable_packing
    from odc_triton.nn.replace import replace_layers

    model = _plain(name)
    if _is_packed(name, column):
        enable_packing(model)
    if column == "LoRA":
        model = _adapted(model)
    if role := ROLES.get(column):
        choice = "qkv=triton/direct/fused" if column == FUSED else "auto"
        replaced = replace_layers(model, roles=[role], choice=choice, verbose=False)
        if not replaced.swapped[role]:
            raise RuntimeError("; ".join(f"{name}: {why}" for name, why in replaced.left.items()))
    return model


def _adapted(model: nn.Module) -> nn.Module:
    from odc_triton.jobs.train.model import add_adapters

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of old names in transformers, and of routed experts
        model = add_adapters(model, rank=4, alpha=None, targets="all-linear")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:  # with B = 0, A would have no gradient
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()


def _alone(model: nn.Module, sample: dict[str, torch.Tensor]) -> torch.Tensor:
    """The summed loss of one sample, by plain torch."""
    ids = sample["input_ids"][None]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _targets(of: list[dict[str, torch.Tensor]]) -> int:
    return sum(len(sample["input_ids"]) - 1 for sample in of)


@functools.cache
def plain(name: str, lora: bool) -> Found:
    torch.set_num_threads(1)
    model, every = _plain(name), samples(Setup())
    model = _adapted(model) if lora else model
    loss = sum(_alone(model, sample) for sample in every) / _targets(every)
    loss.backward()
    return loss.item(), gradients_of(model)


def _on_shards(rank: int, world: int, name: str, column: str) -> Found:
    from odc_triton import enable_split, fully_shard, minibatch
    from odc_triton.balance import count_target_tokens
    from odc_triton.hf import summed_loss

    model = fully_shard(_prepared(name, column), backend="cpu-sharded")
    if column == "splits":
        enable_split(model, tokens=48)
    if _is_packed(name, column):
        mine = packs_of(Setup(deal="two" if column == "splits" else "no segments"), rank)
        tokens, split, loss_of = count_target_tokens(mine), mine.split, summed_loss
    else:
        mine = samples(Setup())[rank::world]
        tokens, split, loss_of = _targets(mine), None, _alone
    total = 0.0
    with minibatch(model, tokens=tokens, split=split) as mb:
        for each in mine:
            loss = loss_of(model, each) / mb.tokens
            loss.backward()
            total += loss.item()
    return total, {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}


def _every(rank: int, world: int, cells: list[tuple[str, str]]) -> dict[tuple[str, str], Found | str]:
    """What was found, or what was raised."""
    found: dict[tuple[str, str], Found | str] = {}
    for title, column in cells:
        try:
            found[title, column] = _on_shards(rank, world, TITLES[title], column)
        except Exception as error:
            found[title, column] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[dict[tuple[str, str], Found | str]]:
    """Of both ranks, for the cells whose tests were selected: one launch runs them all."""
    chosen = {item.callspec.id for item in request.session.items if getattr(item, "originalname", "") == "test_cell"}
    return ranks.run(_every, 2, [cell for cell in CELLS if "-".join(cell) in chosen], timeout_s=1700)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first one waits for the ranks, which run all cells
@pytest.mark.parametrize(
    ("title", "column"), [pytest.param(*cell, id="-".join(cell), marks=MODELS.mark(*cell)) for cell in CELLS]
)
def test_cell(outcomes: list, title: str, column: str) -> None:
    found, name = [each[title, column] for each in outcomes], TITLES[title]
    if refused := refusal(name, column):
        for said in found:
            assert isinstance(said, str), "it is not refused"
            assert refused[0] in said
        return
    assert not isinstance(found[0], str), found[0]
    want_loss, want = plain(name, column == "LoRA")
    assert sum(loss for loss, _ in found) == pytest.approx(want_loss, rel=1e-5)  # fp32, in another order
    tolerance = 2e-5 if name in HYBRIDS else 1e-5  # fp32 sums in another order, and by a state
    for _, gradients in found:
        assert_same_gradients(gradients, want, tolerance, floor=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("title", [pytest.param(title, marks=MODELS.mark(title, "simulate")) for title in TITLES])
def test_simulated(title: str, tmp_path: Path) -> None:
    """The simulator counts the parameters of the model of transformers, from its config.json."""
    from odc_triton.tools.simulate.models import Model

    name = TITLES[title]
    with torch.device("cpu" if name in HYBRIDS else "meta"):
        model = hybrid(name) if name in HYBRIDS else class_of(name)(config_of(name, **WIDE))
    model.config.save_pretrained(tmp_path)
    if refused := refusal(name, "simulate"):
        with pytest.raises(ValueError, match=refused[0]):
            Model.find(str(tmp_path))
        return
    assert Model.find(str(tmp_path)).parameters == sum(parameter.numel() for parameter in model.parameters())
