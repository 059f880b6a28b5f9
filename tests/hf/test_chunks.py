"""MLPs and norms in chunks of tokens give the model's own loss and gradients, and no tensor of all tokens is wide."""

from __future__ import annotations

import contextlib
import copy

import peft
import pytest
import torch
from torch import nn

from odc_triton import fully_shard, minibatch
from odc_triton.hf import compute_in_chunks, summed_loss
from odc_triton.nn.modules import Linear
from odc_triton.nn.replace import replace_layers
from tests.hf.test_attention import LargestTensor
from tests.support import slow
from tests.support.families import FAMILIES, causal_lm
from tests.support.hybrids import HYBRIDS, hybrid
from tests.support.models import build
from tests.support.parity import TRANSFORMS, one_step

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
Found = tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, int]]
TOKENS = 45
IDS = torch.randint(3, 97, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> Found:
    """The loss, each gradient, and how often each weight's hook was called."""
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda _, name=name: calls.update({name: calls.get(name, 0) + 1})
            )
    torch.manual_seed(3)
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}, calls


def same(got: dict, want: dict, tolerance: float) -> None:
    assert got.keys() == want.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= tolerance * largest, name


_FAST = ("Qwen3", "Phi3", "GPTNeoX", "StableLm", "Gemma2")
_OTHERS = [name for name in (*FAMILIES, *HYBRIDS) if name not in _FAST and not (name in HYBRIDS and "images" in name)]


@pytest.mark.parametrize("family", [*_FAST, *map(slow, _OTHERS)])
def test_gradients(family: str) -> None:
    torch.manual_seed(0)
    plain = hybrid(family) if family in HYBRIDS else causal_lm(family, spread=0.05)
    kind = "recurrent" if family in HYBRIDS else FAMILIES[family].kind
    # Grouped products of experts have no fp64; some norms sum their weight's gradient in fp32, as rules compute in it.
    dtype = torch.float32 if kind.startswith("mixture") else torch.float64
    coarse = dtype is torch.float32 or family.startswith(("Gemma", "Cohere")) or family in HYBRIDS
    model = TRANSFORMS["checkpointing"](copy.deepcopy(plain.to(dtype)))
    changed = compute_in_chunks(model, tokens=8)
    want, got = step(plain), step(model)
    assert got[0] == pytest.approx(want[0].item(), rel=1e-6)
    same(got[1], want[1], 5e-6 if coarse else 1e-12)
    assert set(got[2].values()) == {1}, "a hook is called once, not for each chunk"
    mlps = sum(name.endswith((".mlp", ".feed_forward")) for name in changed)
    assert (
        mlps == plain.config.get_text_config().num_hidden_layers
        or kind.startswith(("mixture", "state", "recurrent"))
        or family == "OPT"
    )


class Widest(LargestTensor):
    """The most elements for each token of the tensors of all tokens, or of all but one, that operators returned."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = {tokens, tokens - 1}

    def count(self, tensor: torch.Tensor) -> int:
        tokens = self._tokens & {*tensor.shape}
        return tensor.numel() // max(tokens) if tokens else 0


@pytest.mark.parametrize("sharded", [False, True])
def test_no_tensor_of_all_tokens_is_as_wide_as_the_mlp_or_the_vocabulary(sharded: bool) -> None:
    """In training and in evaluation, in both passes. The fused head takes at least 512 words at a time."""
    tokens, wide = 64, 640
    ids = torch.randint(3, 1536, (1, tokens), generator=torch.Generator().manual_seed(1))
    pack = {"input_ids": ids, "position_ids": torch.arange(tokens)[None], "labels": ids}

    def widest(chunks: bool, head: bool, trains: bool = True) -> int:
        model = causal_lm("Llama", attention="sdpa", intermediate_size=wide, vocab_size=1536)
        model = TRANSFORMS["checkpointing"](model)
        if head:
            replace_layers(model, roles=["head"], verbose=False)
        model = fully_shard(model, backend="cpu-sharded") if sharded else model
        if chunks:
            compute_in_chunks(model, tokens=16)
        if not trains:
            model.eval().get_output_embeddings().train()  # as jobs evaluate
        inside = minibatch(model, tokens=tokens) if sharded and trains else contextlib.nullcontext()
        with inside, torch.set_grad_enabled(trains), Widest(tokens) as seen:
            loss = summed_loss(model, pack)
            if trains:
                loss.backward()
        return seen.elements

    for trains in (True, False):
        assert widest(True, True, trains) < wide
        assert widest(False, True, trains) == wide
        assert widest(True, False, trains) == 1536


class InTurn(nn.Module):
    """Chunks of a module by plain torch."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.run = of.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.run(rows) for rows in x.split(8, dim=1)], dim=1)


def test_adapters_with_dropout_draw_the_same_numbers_again() -> None:
    """Against the same chunks by plain torch, without checkpointing; under autocast, whose casts are not kept."""

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        options = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
        return peft.get_peft_model(causal_lm("Llama"), options)

    for half in (False, True):
        plain, model = adapted(), TRANSFORMS["checkpointing"](adapted())
        for layer in plain.base_model.model.model.layers:
            vars(layer.mlp)["forward"] = InTurn(layer.mlp)
        compute_in_chunks(model, tokens=8)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            want, got = step(plain), step(model)
        assert got[0] == pytest.approx(want[0].item(), rel=1e-6)
        same(got[1], want[1], 1e-2 if half else 5e-6)
        assert all("lora" in name for name in got[2])
        assert set(got[2].values()) == {1}


@pytest.mark.parametrize("choice", ["auto", "eager/direct/fused", "eager/gathered/whole"])
@pytest.mark.parametrize("backend", ["cpu", "cpu-sharded"])
@pytest.mark.parametrize("place", ["before", "after", "MLPs as units", "parts of an MLP as units"])
def test_sharded(choice: str, backend: str, place: str) -> None:
    """With layers whose weights are never whole, too, which add each chunk's gradient. An MLP of units stays whole."""
    want_loss, want = one_step(build("Qwen3"), "Qwen3", [9, 5])
    model = TRANSFORMS["checkpointing"](build("Qwen3"))
    if choice != "auto":
        replace_layers(model, choice=choice, verbose=False)
        assert type(model.model.layers[0].mlp.up_proj) is Linear
    if place == "before":
        compute_in_chunks(model, tokens=2)
    for layer in model.model.layers if "units" in place else ():
        fully_shard(layer.mlp.up_proj if "parts" in place else layer.mlp, backend=backend)
    model = fully_shard(model, backend=backend)
    if place != "before":
        compute_in_chunks(model, tokens=2)
    loss, got = one_step(model, "Qwen3", [9, 5])
    assert loss == pytest.approx(want_loss, rel=1e-6)
    same(got, want, 5e-6)


def test_how_often_an_mlp_computes() -> None:
    """Twice for each token, as without chunks; at once for few tokens, and where nothing is computed again."""
    model = TRANSFORMS["checkpointing"](build("Llama"))
    seen: list[int] = []
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    compute_in_chunks(model, tokens=TOKENS)
    assert model(input_ids=IDS).logits.grad_fn is not None
    assert seen == [TOKENS]
    assert len(compute_in_chunks(model, tokens=20)) == 2 * 3 + 1
    loss = model(input_ids=IDS, labels=IDS).loss
    assert seen[1:] == [20, 20, 5]
    loss.backward()
    assert seen[4:] == [20, 20, 5]
    model.gradient_checkpointing_disable()
    model(input_ids=IDS)
    assert seen[7:] == [TOKENS]
    with pytest.raises(ValueError, match="tokens is 0; give the tokens of a chunk, 1 or more"):
        compute_in_chunks(model, tokens=0)
