"""Routers' auxiliary losses on packs, against transformers' own on each sample alone."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from odc_triton import fully_shard, hf, minibatch
from odc_triton.balance import MinibatchSampler
from odc_triton.packs.attention import PREPARED_MASK
from odc_triton.packs.collate import count_target_tokens, pack_collate
from odc_triton.packs.loss import model_inputs
from odc_triton.packs.pack_loader import PackLoader
from tests.support import ranks, slow
from tests.support.families import causal_lm, with_lora
from tests.support.gradients import assert_same_gradients, gradients_of
from tests.support.trainer_case import samples

WEIGHT = 0.5  # as large as the loss, or an error in one of them would not show
FAMILIES = ("Mixtral", "Qwen3Moe", "GptOss", slow("Qwen2Moe"), slow("GraniteMoe"))


def mixture(name: str = "Mixtral") -> nn.Module:
    torch.manual_seed(0)
    model = causal_lm(name, spread=0.02, **({} if name in ("Mixtral", "GraniteMoe", "Qwen2Moe") else {"head_dim": 8}))
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, WEIGHT
    return model


def checkpoint(model: nn.Module, *, reentrant: bool) -> None:
    """By transformers' own method, which versions name differently."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def plain_losses(model: nn.Module, sample: dict[str, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """A sample's summed loss and its routers' auxiliary loss, by transformers."""
    found = model(input_ids=torch.tensor([sample["input_ids"]]), use_cache=False, output_router_logits=True)
    labels = torch.tensor(sample["labels"])[1:]
    return F.cross_entropy(found.logits[0, :-1], labels, reduction="sum"), found.aux_loss


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("checkpointing", [False, slow(True)])
def test_of_each_sample_of_a_pack(name: str, checkpointing: bool) -> None:
    """Values and gradients. A sample has one token, which is a part of the mean and has no target."""
    model = mixture(name)
    plain = copy.deepcopy(model)
    hf.enable_packing(model)
    if checkpointing:
        checkpoint(model, reentrant=False)
    taken = [*samples()[:4], {"input_ids": [9], "labels": [9]}]
    (pack,) = pack_collate([taken])
    assert model_inputs(pack, model)["attention_mask"].shape == PREPARED_MASK
    loss, router = hf.summed_losses(model, pack)
    want = [plain_losses(plain, sample) for sample in taken]
    for found, terms in zip((loss, router), zip(*want, strict=True), strict=True):
        assert found.item() == pytest.approx(sum(terms).item(), rel=1e-6)
    (loss / 50 + router).backward()
    (sum(each for each, _ in want) / 50 + sum(each for _, each in want)).backward()
    assert_same_gradients(gradients_of(model), gradients_of(plain))
    with torch.no_grad():
        assert torch.equal(hf.summed_losses(model, pack)[1], router)
        model.config.output_router_logits = False
        assert hf.summed_losses(model, pack)[1] == 0  # and nothing else has changed
        assert torch.equal(hf.summed_loss(model, pack), loss)


def test_refused() -> None:
    model, dense = mixture(), causal_lm("Qwen2")
    for each in (model, dense):
        hf.enable_packing(each)
    dense.config.output_router_logits, dense.config.router_aux_loss_coef = True, 0.1
    (pack,) = pack_collate([samples()[:2]])
    one = {"input_ids": pack["input_ids"], "labels": pack["labels"]}
    (branch,) = pack_collate([[sample | {"segment": segment} for sample, segment in _branches()]])
    for wrong, given, words in (
        (dense, pack, "Qwen2ForCausalLM does not return its routers' logits by token: set router_aux_loss_coef to 0"),
        (model, one, "this pack has no cu_seq_lens_q: give packs of unsplit samples, of pack_collate"),
        (model, branch, "this pack has segments of samples: give packs of unsplit samples"),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            hf.summed_losses(wrong, given)
    checkpoint(model, reentrant=True)
    with pytest.raises(ValueError, match="MixtralForCausalLM's routers' logits have no gradient: checkpoint"):
        hf.summed_losses(model, pack)


def _branches() -> list[tuple[dict[str, list[int]], Any]]:
    from odc_triton.plan.entries import Segment

    first = samples()[1]
    ids = [*first["input_ids"][:6], 5, 7, 8]
    return [(first, Segment(0, 0, len(first["input_ids"]))), ({"input_ids": ids}, Segment(1, 6, 9, parent=0))]


# ------------------------------------------------------------------ in a training loop of one's own


PER_RANK = 4


def _own_loop(rank: int, world: int, backend: str, lora: bool) -> tuple[list[int], dict[str, torch.Tensor]]:
    """The minibatches' samples in an epoch, whose last one is not full, and the sum of gradients."""
    import tests.support.simulated  # noqa: F401

    model = mixture()
    hf.enable_packing(model)
    if lora:
        model = with_lora(model, ("q_proj",))
    else:
        checkpoint(model, reentrant=False)
    model = fully_shard(model, backend=backend, exact=lora)
    data = samples()
    sampler = MinibatchSampler([len(each["input_ids"]) for each in data], PER_RANK, 32, rank=rank, world=world)
    counts, total = [], {}
    for packs in PackLoader(data, sampler, num_workers=int(lora)):
        counts.append(packs.samples)
        with minibatch(model, tokens=count_target_tokens(packs)) as mb:
            for pack in packs:
                loss, router = hf.summed_losses(model, pack)
                (loss / mb.tokens + WEIGHT * router / packs.samples).backward()
        for name, each in model.named_parameters():
            if each.grad is not None:
                total[name] = total.get(name, 0) + each.grad.full_tensor()
        model.zero_grad()
    return counts, total


def _each(rank: int, world: int, lora: bool) -> list[Any]:
    return [_own_loop(rank, world, backend, lora) for backend in ("cpu", "cpu-sharded")]


@pytest.mark.parametrize("lora", [False, slow(True)])
def test_in_a_loop_of_ones_own(lora: bool) -> None:
    """Whatever the backend, with checkpointing, or adapters and exact sums; ranks have different samples and packs."""
    data = samples()
    plain, counts = with_lora(mixture(), ("q_proj",)) if lora else mixture(), []
    for packs in MinibatchSampler([len(each["input_ids"]) for each in data], 2 * PER_RANK, 32, rank=0, world=1):
        taken = [data[index] for pack in packs for index in pack]
        counts.append(len(taken))
        tokens = sum(count_target_tokens(pack_collate([[each]])) for each in taken)
        for loss, router in (plain_losses(plain, each) for each in taken):
            (loss / tokens + WEIGHT * router / len(taken)).backward()
    assert counts == [8, 4]
    for of_rank in ranks.run(_each, 2, lora):
        for found, grads in of_rank:
            assert found == counts
            assert_same_gradients(grads, gradients_of(plain))
