"""Ways to call a hybrid that is packed, and modules whose forward is not transformers' own."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from odc_triton.hf import enable_packing
from odc_triton.packs.attention import keep_documents
from tests.support.hybrids import hybrid, tokens
from tests.support.versions import is_older

LENGTHS = [5, 9, 3]
CACHE = "past_key_values" if is_older("5.24") else "cache"
FP32 = torch.float32


@pytest.fixture(scope="module", params=["qwen3_5", "nemotron_h"])
def models(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """Packed, and plain."""
    packed, plain = (hybrid(request.param, dtype=FP32).eval() for _ in range(2))
    enable_packing(packed)
    return packed, plain


def documents() -> list[Tensor]:
    return [torch.tensor([tokens(length, at)]) for at, length in enumerate(LENGTHS)]


def by_head(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """As value heads and fused losses call a decoder."""
    return model.lm_head(model.model(input_ids=ids, position_ids=positions, use_cache=False)[0])


def saved(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)(ids, position_ids=positions).logits


def as_rows(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Documents of rows laid end to end, as many as rows, whose bounds are others."""
    assert ids.shape[1] == 17
    rows = torch.cat([ids, ids[:, :1]], dim=1).view(3, 6)
    ends = torch.tensor([0, 5, 14, 18], dtype=torch.int32)
    more = torch.cat([positions, torch.tensor([[3]])], dim=1).view(3, 6)
    return model(rows, position_ids=more, cu_seq_lens_q=ends, max_length_q=9).logits.view(1, 18, -1)[:, :17]


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "by place": lambda model, ids, positions: model(ids, None, positions).logits,
    "ones as mask": lambda model, ids, positions: (
        model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    ),
    "forward": lambda model, ids, positions: model.forward(input_ids=ids, position_ids=positions).logits,
    "without its head": by_head,
    "embedded": lambda model, ids, positions: (
        model(inputs_embeds=model.get_input_embeddings()(ids), position_ids=positions).logits
    ),
    "copied": lambda model, ids, positions: copy.deepcopy(model)(ids, position_ids=positions).logits,
    "saved": saved,
    "rows": as_rows,
    "packed twice": lambda model, ids, positions: (enable_packing(model), model(ids, position_ids=positions).logits)[1],
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_documents_stay_apart(models: tuple[nn.Module, nn.Module], way: str) -> None:
    packed, plain = models
    want = torch.cat([plain(each).logits for each in documents()], dim=1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    found = WAYS[way](packed, torch.cat(documents(), dim=1), positions)
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("given", [{}, {"segments": [None]}], ids=["plain", "one document"])
@torch.no_grad()
def test_a_cache_has_the_states_of_a_document(models: tuple[nn.Module, nn.Module], given: dict[str, Any]) -> None:
    packed, plain = models
    ids = documents()[1]
    want = plain(ids).logits[:, -1]
    cache = packed(ids[:, :-1], position_ids=torch.arange(8)[None], use_cache=True, **given).past_key_values
    found = packed(ids[:, -1:], **{CACHE: cache}, position_ids=torch.tensor([[8]])).logits[:, -1]
    assert (found - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("names", [{"past_key_values": 1}, {"cache": 1}, {"past_key_values": None, "cache": 1}])
def test_a_cache_by_any_name_goes_before_documents(names: dict[str, Any]) -> None:
    positions = torch.tensor([[0, 1, 0]])
    assert keep_documents(nn.Module(), (), {"position_ids": positions}) is not None
    assert keep_documents(nn.Module(), (), {"position_ids": positions, **names}) is None


def own_forward(mixer: nn.Module) -> None:
    mixer.forward = lambda hidden_states, **_: hidden_states


def subclass(mixer: nn.Module) -> None:
    class Scaled(type(mixer)):
        def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
            return 2 * super().forward(hidden_states, **given)

    mixer.__class__ = Scaled


@pytest.mark.parametrize("change", [own_forward, subclass])
def test_another_forward_is_refused_and_kept(change: Callable[[nn.Module], None]) -> None:
    model = hybrid("qwen3_5", dtype=FP32)
    mixer = model.model.layers[0].linear_attn
    change(mixer)
    own, kind = vars(mixer).get("forward"), type(mixer)
    with pytest.raises(RuntimeError, match=f"{kind.__name__} has a forward of its own, which can't be told"):
        enable_packing(model)
    assert (vars(mixer).get("forward"), type(mixer)) == (own, kind)
    assert "forward" not in vars(model.model.layers[2].linear_attn)
