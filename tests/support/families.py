"""Small transformers models with random weights, one per family: what `replace_layers` finds, how they train."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .models import GPT2_SIZES, SIZES

# For families whose attention has our adapter, with head sizes that its kernel supports.
_SIZES = SIZES | {"head_dim": 16}
_WIDE = _SIZES | {"hidden_size": 64, "head_dim": None}  # for families whose configuration has no head_dim
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3, "num_key_value_heads": None}

_OURS = """\
attention: model.layers.*.self_attn (2)
embedding: model.embed_tokens
linear: lm_head, model.layers.*.mlp.gate_proj (2), model.layers.*.mlp.up_proj (2), model.layers.*.mlp.down_proj (2)"""
_PROJECTIONS = ", ".join(f"model.layers.*.self_attn.{each}_proj (2)" for each in "qkvo")
_MLP = ", ".join(f"model.layers.*.mlp.{each}_proj (2)" for each in ("gate", "up", "down"))
_UNKNOWN = "of an unknown family"
_GENERIC = f"attention: none\nembedding: model.embed_tokens\nlinear: lm_head, {_PROJECTIONS}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """`name`: as in its transformers classes; `found`: what `replace_layers` prints."""

    name: str
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)
    model: str = "ForCausalLM"
    config: str = "Config"
    found: str = _OURS


FAMILIES = {
    "llama": Family(name="Llama"),
    "llama-8": Family(
        name="Llama",
        sizes=_SIZES | {"head_dim": 8},
        found=(
            f"{_GENERIC}, {_MLP}\n"
            "left alone: model.layers.*.self_attn (2), its heads have 8 elements; "
            "the kernel supports 16, 32, 64, 128, 256"
        ),
    ),
    "mistral": Family(name="Mistral", sizes=_SIZES | {"sliding_window": None}),
    "mistral-window": Family(name="Mistral", sizes=_SIZES | {"sliding_window": 4}),
    "qwen2": Family(name="Qwen2", sizes=_WIDE),
    "qwen2-tied": Family(name="Qwen2", sizes=_WIDE | {"tie_word_embeddings": True}),
    "qwen3": Family(name="Qwen3"),
    "gemma3": Family(
        name="Gemma3",
        config="TextConfig",
        sizes=_SIZES | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
        found=(
            f"attention: none\nembedding: none\nlinear: lm_head, {_PROJECTIONS}, {_MLP}\n"
            f"left alone: model.layers.*.self_attn (2), a Gemma3Attention, {_UNKNOWN}\n"
            "left alone: model.embed_tokens, a transformers.models.gemma3.modeling_gemma3."
            "Gemma3TextScaledWordEmbedding and no plain Embedding"
        ),
    ),
    "phi3": Family(
        name="Phi3",
        sizes=_SIZES | {"head_dim": None},
        found=(
            "attention: none\nembedding: model.embed_tokens\nlinear: lm_head, model.layers.*.self_attn.o_proj (2), "
            "model.layers.*.self_attn.qkv_proj (2), model.layers.*.mlp.gate_up_proj (2), "
            "model.layers.*.mlp.down_proj (2)\n"
            f"left alone: model.layers.*.self_attn (2), a Phi3Attention, {_UNKNOWN}"
        ),
    ),
    "gpt2": Family(  # tied; its blocks' weights are Conv1D's
        name="GPT2",
        sizes=GPT2_SIZES,
        model="LMHeadModel",
        found=(
            "attention: none\nembedding: transformer.wte, transformer.wpe\nlinear: lm_head\n"
            f"left alone: transformer.h.*.attn (2), a GPT2Attention, {_UNKNOWN}\n"
            "left alone: transformer.h.*.attn.c_attn (2), transformer.h.*.attn.c_proj (2), "
            "transformer.h.*.mlp.c_fc (2), transformer.h.*.mlp.c_proj (2), a Conv1D, not a Linear"
        ),
    ),
    "olmo2": Family(
        name="Olmo2",
        sizes=_SIZES | {"head_dim": None},
        found=(f"{_GENERIC}, {_MLP}\nleft alone: model.layers.*.self_attn (2), a Olmo2Attention, {_UNKNOWN}"),
    ),
    "qwen3-moe": Family(
        name="Qwen3Moe",
        sizes=_SIZES | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
        found=f"{_GENERIC}\nleft alone: model.layers.*.self_attn (2), a Qwen3MoeAttention, {_UNKNOWN}",
    ),
    "bert": Family(
        name="Bert",
        sizes=_SIZES | _BERT,
        model="ForSequenceClassification",
        found=(
            "attention: none\nembedding: "
            + ", ".join(f"bert.embeddings.{each}_embeddings" for each in ("word", "position", "token_type"))
            + "\nlinear: classifier, "
            + ", ".join(f"bert.encoder.layer.*.attention.self.{each} (2)" for each in ("query", "key", "value"))
            + ", bert.encoder.layer.*.attention.output.dense (2), bert.encoder.layer.*.intermediate.dense (2), "
            "bert.encoder.layer.*.output.dense (2), bert.pooler.dense\n"
            f"left alone: bert.encoder.layer.*.attention (2), a BertAttention, {_UNKNOWN}"
        ),
    ),
}
FUSED = ["llama", "mistral-window", "qwen2", "qwen3"]
GENERIC = ["gemma3", "phi3", "gpt2", "olmo2", "qwen3-moe", "bert"]


def build(name: str, attention: str = "sdpa") -> nn.Module:
    """The model, in training mode; its weights are always the same."""
    import transformers

    family = FAMILIES[name]
    sizes = {key: value for key, value in family.sizes.items() if value is not None or key == "sliding_window"}
    torch.manual_seed(0)
    config = getattr(transformers, family.name + family.config)(**sizes, attn_implementation=attention)
    model = getattr(transformers, family.name + family.model)(config).train()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough for attention, biases and norms to matter
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


# ---------------------------------------------------------------------- microbatches

SIZES = (5, 17, 3, 9, 1)  # target tokens of one minibatch's microbatches, all ranks together
FEW = (9, 3)  # for kernels in the interpreter


def microbatches(name: str, sizes: tuple[int, ...], step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    if name != "bert":
        return [{"input_ids": torch.randint(3, 97, (1, size + 1), generator=generator)} for size in sizes]
    batches = []
    for size in sizes:
        ids = torch.randint(3, 97, (1 + size % 3, size + 2), generator=generator)
        ids[0, size:] = 0
        labels = torch.randint(0, 3, (len(ids),), generator=generator)
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels})
    return batches


def count(batch: dict[str, torch.Tensor]) -> int:
    """The number of terms in its loss."""
    return len(batch["labels"]) if "labels" in batch else batch["input_ids"][:, 1:].numel()


def summed_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    if "labels" in batch:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="sum")
    ids = batch["input_ids"]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


# ---------------------------------------------------------------------- what users do to a model before training


def _checkpointing(model: nn.Module, use_reentrant: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23, not yet in 5.17
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


def _lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}  # with B = 0 nothing would show at first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft 0.21 uses a former name in transformers 5.23
        return get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj", "up_proj"], **options))


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "checkpointing": functools.partial(_checkpointing, use_reentrant=False),
    "reentrant": functools.partial(_checkpointing, use_reentrant=True),
    "lora": _lora,
}

# ---------------------------------------------------------------------- training


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a model is trained. `change`: one of CHANGES, before `replace_layers` or after it."""

    name: str
    roles: tuple[str, ...] = ("attention", "embedding", "linear")
    choice: str = "auto"
    backend: str = "cpu"
    change: str = "none"
    change_first: bool = False
    steps: int = 10
    sizes: tuple[int, ...] = SIZES
    autocast: bool = False


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Losses of this rank's microbatches by step, the first minibatch's gradients, the weights after the last."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def prepared(setup: Setup) -> nn.Module:
    from odc_triton.nn.replace import replace_layers

    model, change = build(setup.name), CHANGES[setup.change]
    if setup.change_first:
        model = change(model)
    replace_layers(model, roles=setup.roles, choice=setup.choice, verbose=False)
    return model if setup.change_first else change(model)


def on_shards(rank: int, world: int, setup: Setup) -> Trained:
    """The second of two ranks runs the second microbatch, the first runs all others."""
    from odc_triton import full_parameters, fully_shard

    model = fully_shard(prepared(setup), backend=setup.backend)
    trained = train(model, setup, lambda index: world == 1 or (rank == 1) == (index == 1))
    return replace(trained, weights=dict(full_parameters(model)))


def unsharded(setup: Setup) -> Trained:
    """The same in plain transformers, which knows no roles, choices or backends."""
    return _unsharded(
        Setup(**{each: getattr(setup, each) for each in ("name", "change", "steps", "sizes", "autocast")})
    )


@functools.cache
def _unsharded(setup: Setup) -> Trained:
    torch.set_num_threads(1)
    return train(CHANGES[setup.change](build(setup.name)), setup)


@contextlib.contextmanager
def _one_minibatch(model: nn.Module, tokens: int) -> Iterator[int]:
    from odc_triton import minibatch
    from odc_triton.nn.operand import is_sharded

    if not is_sharded(model):
        yield tokens
        return
    with minibatch(model, tokens=tokens) as mb:
        yield mb.tokens


def train(model: nn.Module, setup: Setup, mine: Callable[[int], bool] = lambda index: True) -> Trained:
    """AdamW on the microbatches of every step whose index is `mine`."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses, first, norms = [], {}, []
    for step in range(setup.steps):
        batches = microbatches(setup.name, setup.sizes, step)
        batches = [batch for index, batch in enumerate(batches) if mine(index)]
        optimizer.zero_grad()
        losses.append(0.0)
        with _one_minibatch(model, sum(map(count, batches))) as tokens:
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=setup.autocast):
                    loss = summed_loss(model, batch)
                (loss / tokens).backward()
                losses[-1] += loss.item()
        if step == 0:
            first = {key: _whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}
        norms.append(float(_whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0))))
        optimizer.step()
    weights = {key: p.detach().clone() for key, p in model.named_parameters()}
    return Trained(losses=losses, gradients=first, norms=norms, weights=weights)


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor().clone() if hasattr(value, "full_tensor") else copy.deepcopy(value)
