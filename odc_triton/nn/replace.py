"""Swaps layers of a model for those of `odc_triton.nn`, in place: names and state-dict keys stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..base.untyped import untyped
from . import experts
from . import families as attention
from .choice import AUTO, parse
from .modules import Embedding, Linear, LMHead, gathers_always, has_hooks
from .operand import is_sharded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
DEFAULT_ROLES = ("attention", "embedding", "experts", "linear")
HEAD = "head"  # not one of them: it changes what a model returns in training


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """The result of `replace_layers`.

    swapped: names of swapped modules by role.
    left: the reasons why others stay, by name.
    """

    swapped: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{role}: {', '.join(_grouped(names)) or 'none'}" for role, names in self.swapped.items()]
        for why in dict.fromkeys(self.left.values()):
            names = _grouped([name for name, reason in self.left.items() if reason == why])
            lines.append(f"left alone: {', '.join(names)}, {why}")
        return "\n".join(lines)


def _grouped(names: list[str]) -> list[str]:
    """Joins names that differ only in numbers, with their count: `layers.*.mlp.up_proj (28)`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), []).append(name)
    return [group[0] if len(group) == 1 else f"{pattern} ({len(group)})" for pattern, group in groups.items()]


class _NamedModule(NamedTuple):
    name: str
    module: nn.Module
    parent: nn.Module | None  # None for the model itself


def replace_layers(
    model: nn.Module, *, roles: Iterable[str] = DEFAULT_ROLES, choice: str = AUTO, verbose: bool = True
) -> Replaced:
    """Swaps the layers of these roles for ours. Call it before `fully_shard`. A layer that ours can't replace stays,
    and the reason is reported.

    - "attention": of Llama, Mistral, Qwen2 and Qwen3 in transformers. The chosen attention function stays.
    - "experts": of all mixtures that transformers runs by its ExpertsInterface, with PEFT's adapters of them.
    - "embedding", "linear": every `torch.nn.Embedding` and `torch.nn.Linear`.
    - "head": the vocabulary projection of a causal LM of transformers. Training then never computes its logits:
      `model(input_ids=…, labels=…).loss`, or any `cross_entropy` of `outputs.logits`, takes a chunk of the vocabulary
      at a time, and `outputs.logits.log_probs(targets)` gives log-probabilities and entropies.

    model: is changed in place.
    roles: some of these five, by default all but "head".
    choice: how they compute, docs/layers.md; by default from its table and the variable ODC_OPERATORS.
    verbose: print a summary.

    Returns what was swapped, and what stayed. Raises ValueError for an unknown role or choice, RuntimeError for a model
    that is already sharded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"replace_layers takes an nn.Module, not {model!r:.60}")
    if any(is_sharded(module) for module in model.modules()):
        raise RuntimeError("replace_layers comes before fully_shard: layers of a sharded model can't be swapped")
    parse(choice)
    if roles is None:
        raise ValueError(f"roles is None; give some of {', '.join(_ROLES)}, or leave it out")
    roles = [roles] if isinstance(roles, str) else list(roles)
    unknown = [role for role in roles if role not in _ROLES]
    if unknown:
        raise ValueError(f"roles {unknown} are not known; known are {', '.join(_ROLES)}; give a list of them")
    replaced = Replaced()
    for role in _ROLES:
        if role in roles:
            replaced.swapped[role] = []
            _ROLES[role](model, choice, replaced)
    if roles == list(DEFAULT_ROLES) and not replaced.swapped["experts"]:
        del replaced.swapped["experts"]  # most models have none
    if verbose:
        print(replaced)
    return replaced


def restore_layers(model: nn.Module) -> int:
    """Reverts `replace_layers` in place, before `fully_shard`; returns the number of reverted layers."""
    if any(is_sharded(module) for module in model.modules()):
        raise RuntimeError("restore_layers comes before fully_shard: layers of a sharded model can't be swapped")
    count = 0
    for module in model.modules():
        if isinstance(module, Embedding):
            plain = nn.Embedding
        elif isinstance(module, attention.FusedProjections):
            plain = module._odc_family.attention
        elif isinstance(module, (experts.Experts, experts.AdaptedExperts)):
            plain = untyped(module)._odc_plain
        elif isinstance(module, (Linear, LMHead)):
            plain = nn.Linear
        else:
            continue
        untyped(module).__class__ = plain
        count += 1
    return count


def _places(model: nn.Module, kind: type[nn.Module]) -> list[_NamedModule]:
    """Every module of that class or derived from it, once."""
    if isinstance(model, kind):
        return [_NamedModule(type(model).__name__, model, None)]
    return [
        _NamedModule(f"{prefix}.{name}" if prefix else name, child, parent)
        for prefix, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]


def _replace_attention(model: nn.Module, choice: str, replaced: Replaced) -> None:
    unlike: dict[str, str | None] = {}
    for name, module in model.named_modules():
        family = attention.family_of(module)
        if family is None:
            if _is_attention(module) and not any(name.startswith(f"{outer}.") for outer in replaced.left):
                replaced.left[name] = f"a {type(module).__name__}, of an unknown family"
            continue
        if isinstance(module, attention.FusedProjections):
            continue
        why = attention.why_not(module, family)
        if why is None:
            if family.name not in unlike:
                unlike[family.name] = attention.differs(module, family)
            why = unlike[family.name]
        if why is not None:
            replaced.left[name] = why
            continue
        layer = untyped(module)
        layer.__class__, layer._odc_choice = attention.fused_class(family), choice
        for each in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            if isinstance(each, nn.Linear):  # else adapters of the output, around a layer that "linear" replaces
                projection = untyped(each)
                projection.__class__, projection.choice = Linear, choice
                projection.operator = "linear" if each is layer.o_proj else "qkv"
        replaced.swapped["attention"].append(name)


def _is_attention(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.") and kind.__name__.endswith("Attention")


def _replace_linear(model: nn.Module, choice: str, replaced: Replaced) -> None:
    _swap(model, nn.Linear, Linear, "linear", choice, replaced)
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":  # GPT-2's: it multiplies by a transposed weight
            replaced.left[name] = "a Conv1D, not a Linear"


def _replace_embedding(model: nn.Module, choice: str, replaced: Replaced) -> None:
    _swap(model, nn.Embedding, Embedding, "embedding", choice, replaced)


def _swap(
    model: nn.Module, kind: type[nn.Module], ours: type[nn.Module], role: str, choice: str, replaced: Replaced
) -> None:
    for name, module, parent in _places(model, kind):
        if isinstance(module, (ours, LMHead)):  # ours already, by another role or call
            continue
        why = _unlike(module, kind) or _read_by(parent)
        if why is None and isinstance(module, nn.Embedding) and gathers_always(module):
            why = "it has max_norm, scale_grad_by_freq or sparse gradients"
        if why is not None:
            replaced.left[name] = why
            continue
        untyped(module).__class__, untyped(module).choice = ours, choice
        replaced.swapped[role].append(name)


def _unlike(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if type(module) is not kind:
        return f"a {type(module).__module__}.{type(module).__name__} and no plain {kind.__name__}"
    if "forward" in vars(module):
        return "its forward was replaced"
    return None


def _read_by(parent: nn.Module | None) -> str | None:
    if parent is not None and type(parent).__module__.startswith("torch.nn.") and not isinstance(parent, _CONTAINERS):
        return f"part of a {type(parent).__name__}, which reads its weight without calling it"
    return None


def _replace_head(model: nn.Module, choice: str, replaced: Replaced) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    get_head = getattr(model, "get_output_embeddings", None)
    head: Any = get_head() if callable(get_head) else None
    if head is None:
        replaced.left[type(model).__name__] = "it has no output embeddings"
        return
    if isinstance(head, LMHead):
        return
    why = _unlike_a_head(head) or _changes_logits(model)
    if why:
        replaced.left[names[id(head)]] = why
        return
    head.__class__, head.choice = LMHead, choice
    replaced.swapped[HEAD].append(names[id(head)])


def _changes_logits(model: nn.Module) -> str | None:
    config = getattr(model, "config", None)
    if config is not None and getattr(config.get_text_config(), "final_logit_softcapping", None):
        return f"{type(model).__name__} caps its logits by a tanh, which needs them"
    return None


def _unlike_a_head(head: nn.Module) -> str | None:
    if head.__class__ is not Linear and (why := _unlike(head, nn.Linear)):
        return why
    if head.bias is not None:
        return "it has a bias"
    if head.weight.dtype not in _DTYPES:
        return f"it is {head.weight.dtype}, and not of {', '.join(map(str, _DTYPES))}"
    return "it has hooks" if has_hooks(head) else None


def _replace_experts(model: nn.Module, choice: str, replaced: Replaced) -> None:
    for name, module in model.named_modules():
        if is_parametrized(module, "down_proj"):
            replaced.left[name] = "its weights are parametrised, as packed ones are"
        if isinstance(module, experts.Experts) or not experts.are_experts(module):
            continue
        if why := experts.why_not(module):
            replaced.left[name] = why
            continue
        layer = untyped(module)
        layer.gate, layer.factors, layer.choice = experts.gate_of(module), {}, choice
        layer.__class__ = experts.with_ours(type(module), experts.Experts)
        replaced.swapped["experts"].append(name)
    experts.Experts.adapt_wrappers(model)


# In this order: a later role skips layers of an earlier one.
_ROLES: dict[str, Callable[[nn.Module, str, Replaced], None]] = {
    "attention": _replace_attention,
    HEAD: _replace_head,
    "embedding": _replace_embedding,
    "experts": _replace_experts,
    "linear": _replace_linear,
}
