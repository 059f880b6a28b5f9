"""Packs of hybrid models keep documents, and branches of shared prefixes, apart in every recurrent layer too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from odc_triton.balance import PackedDataset, pack_collate
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.packs.attention import PackingUnsupported
from odc_triton.packs.loss import model_inputs
from odc_triton.plan.entries import Entry, Segment
from odc_triton.recurrent.layers import recurrent_layers
from tests.support import slow
from tests.support.gradients import assert_same_gradients, gradients_of
from tests.support.hybrids import FAST, HYBRIDS, hybrid, one_by_one, rules_in, tokens
from tests.support.parity import TRANSFORMS
from tests.support.vision import FAMILIES

Samples = list[dict[str, Any]]
FP32, FP64, IGNORED, P = torch.float32, torch.float64, -100, Segment
# Shorter than the convolution's kernel, longer than a chunk of the rule, of one token.
LENGTHS = (2, 67, 1, 9)


def rows(fast: Iterable[str] = ()) -> list[Any]:
    """Every family; those that are not `fast` are slow."""
    return [name if name in fast else slow(name) for name in HYBRIDS]


def documents() -> Samples:
    return [{"input_ids": ids, "labels": ids} for ids in map(tokens, LENGTHS, range(len(LENGTHS)))]


def by_positions(pack: dict[str, Any]) -> dict[str, Any]:
    """Without the documents' bounds: as transformers' own collator makes packs."""
    return {name: pack[name] for name in ("input_ids", "position_ids", "labels")}


def check(
    name: str, samples: list[dict[str, Any]], entries: Sequence[Entry] | None = None, change: str = "none"
) -> None:
    """A pack of these entries, by default all samples, has each own token's logits, the loss and the gradients."""
    dtype, tolerance = (FP32, 2e-5) if change == "fp32" else (FP64, 1e-10)
    model = hybrid(name, dtype=dtype)
    with rules_in(dtype):
        want = one_by_one(model, samples)
        enable_packing(model)
        if change in TRANSFORMS:
            TRANSFORMS[change](model)
        (pack,) = pack_collate([PackedDataset(samples)[entries or range(len(samples))]])
        given = by_positions(pack) if change == "by positions" else pack
        model.zero_grad()
        loss = summed_loss(model.train(change != "eval"), given)
        loss.backward()
        logits = model(**model_inputs(given, model)).logits[0].split(pack["cu_seq_lens_q"].diff().tolist())
    assert loss.item() == pytest.approx(want.loss, rel=tolerance)
    for at, own in enumerate(logits):
        entry = entries[at] if entries else at
        number, start = (entry.sample, entry.start) if isinstance(entry, Segment) else (entry, 0)
        alone = want.logits[number][start : start + len(own)]
        assert (own - alone).abs().max() <= tolerance * alone.abs().max(), f"logits of {entry}"
    assert_same_gradients(gradients_of(model), want.gradients, tolerance, floor=1e-3 * tolerance)


@pytest.mark.parametrize("name", rows(FAST))
def test_as_documents_alone(name: str) -> None:
    check(name, documents())


@pytest.mark.slow
@pytest.mark.parametrize("change", ["by positions", "checkpointing", "reentrant", "eval", "fp32"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_as_documents_alone_otherwise(name: str, change: str) -> None:
    check(name, documents(), change=change)


@pytest.mark.slow
def test_with_images() -> None:
    check("qwen3_5, images", FAMILIES["qwen3_vl"].samples([(12, 1), (4, 0), (67, 2), (9, 1)]))


def test_a_layer_that_is_not_told_of_documents_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2's of transformers 5.17."""
    model = hybrid("nemotron_h")

    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        return causal_conv1d_fn(hidden_states)  # noqa: F821

    (mixer, *_) = recurrent_layers(model)
    monkeypatch.setattr(type(mixer), "forward", forward)
    with pytest.raises(PackingUnsupported, match=f"{type(mixer).__name__} can't be told of documents: install transf"):
        enable_packing(model)


@torch.no_grad()
def leak(model: nn.Module, *, bounds: bool = True) -> float:
    """How far the other documents' logits move with the first document's tokens, by the largest logit."""
    both, (first, *others) = [], documents()
    for ids in (first["input_ids"], [each - 1 for each in first["input_ids"]]):
        (pack,) = pack_collate([[{"input_ids": ids}, *others]])
        both.append(model(**model_inputs(pack if bounds else by_positions(pack))).logits[0])
    assert not torch.equal(both[0][: LENGTHS[0]], both[1][: LENGTHS[0]])
    one, other = (logits[LENGTHS[0] :].double() for logits in both)
    return float((one - other).abs().max() / one.abs().max())


@pytest.mark.parametrize("bounds", [True, False])
@pytest.mark.parametrize("name", rows(("qwen3_5",)))
def test_a_document_keeps_its_bits_beside_another(name: str, bounds: bool) -> None:
    model = hybrid(name)
    with rules_in(FP64):
        enable_packing(model)
        assert leak(model, bounds=bounds) <= (1e-12 if HYBRIDS[name].mixture else 0.0)


@pytest.mark.parametrize("name", rows())
def test_nor_under_autocast(name: str) -> None:
    model = hybrid(name, dtype=FP32)
    enable_packing(model)
    with torch.autocast("cpu", torch.bfloat16):
        # Of a mixture's experts each gets another number of tokens, whose products round otherwise.
        assert leak(model) <= (0.05 if HYBRIDS[name].mixture else 0.0)


class _Singles(TorchDispatchMode):
    """Counts what is computed in less than fp64."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), given: dict | None = None) -> Any:
        found = function(*args, **(given or {}))
        several = found if isinstance(found, tuple | list) else [found]
        self.count += sum(getattr(each, "dtype", None) in (FP32, torch.bfloat16) for each in several)
        return found


@pytest.mark.parametrize("name", rows())
def test_these_tests_can_fail(name: str) -> None:
    """Plain transformers' packs by positions leak. What packs are compared with is in fp64 throughout."""
    model = hybrid(name)
    with rules_in(FP64), _Singles() as singles:
        assert leak(model, bounds=False) > 1e-2
        one_by_one(model, documents())
    assert singles.count == 0


# Sample: (sample that it branches off, at which token, tokens after these).
TREE = {1: (0, 8, 7), 3: (0, 1, 5), 4: (0, 9, 5), 5: (0, 2, 1), 7: (0, 8, 66)}  # the last beyond a chunk of the rule
# The convolution reaches tokens of two and of three samples.
TREE = dict(sorted((TREE | {2: (1, 10, 6), 6: (2, 11, 4), 8: (3, 2, 3)}).items()))
ROOT = 20
ENTRIES = [P(0, 0, ROOT), *(P(at, start, start + own, of) for at, (of, start, own) in TREE.items())]


def tree() -> list[dict[str, Any]]:
    """What a branch shares is learned by its parent only."""
    made = [{"input_ids": tokens(ROOT, 0), "labels": tokens(ROOT, 0)}]
    for at, (of, start, own) in TREE.items():
        ids = made[of]["input_ids"][:start] + tokens(own, at)
        made.append({"input_ids": ids, "labels": [IGNORED] * (start + 1) + ids[start + 1 :]})
    return made


@pytest.mark.parametrize("name", rows(("qwen3_5",)))
def test_branches_as_whole_samples(name: str) -> None:
    check(name, tree(), ENTRIES)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["checkpointing", "fp32"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_branches_otherwise(name: str, change: str) -> None:
    check(name, tree(), ENTRIES, change)


@pytest.mark.parametrize("name", rows(("qwen3_5",)))
def test_branches_beside_others(name: str) -> None:
    """Two trees and unsplit samples in a pack, in turns."""
    at = len(ENTRIES)
    other, branch, *alone = P(at, 0, ROOT), P(at + 1, 8, 15, at), *range(at + 2, at + 2 + len(LENGTHS))
    entries = [alone[0], other, alone[1], *ENTRIES, branch, *alone[2:]]
    check(name, tree() + tree()[:2] + documents(), entries)


@pytest.mark.parametrize("name", rows())
def test_generates_as_before(name: str) -> None:
    """A batch padded on the left, with a cache and without."""
    model = hybrid(name, dtype=FP32).eval()
    ids = torch.tensor([[0] * 5 + tokens(2, 1), tokens(7, 2)])

    def generate() -> list[Tensor]:
        options = {"attention_mask": (ids != 0).long(), "do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8}
        return [model.generate(ids, use_cache=cache, **options) for cache in (True, False)]

    before = generate()
    enable_packing(model)
    for now, then in zip(generate(), before, strict=True):
        assert torch.equal(now, then)
