"""Swaps layers of a model for those of `odc_triton.nn`, in place: names and state-dict keys stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from .module import is_sharded
from .nn import LMHead


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """What `replace_layers` did: names of the modules it swapped by role, and why it left others alone."""

    swapped: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{role}: {', '.join(names) or 'none'}" for role, names in self.swapped.items()]
        return "\n".join(lines + [f"left alone: {name}, {why}" for name, why in self.left.items()])


def replace_layers(model: nn.Module, *, roles: Iterable[str], verbose: bool = True) -> Replaced:
    """Swaps the layers of these roles for ours. Call it before `fully_shard`; prints what it did unless told not to.

    roles: "head": the vocabulary projection of a causal LM of transformers. In training its logits are then not made:
    `model(input_ids=…, labels=…).loss`, or any `cross_entropy` of `outputs.logits`, goes through a chunk of the
    vocabulary at a time, and `outputs.logits.log_probs(targets)` gives log-probabilities and entropies.

    A layer of another structure than ours computes is left alone, with the reason. Raises ValueError for an unknown
    role, RuntimeError for a model that is sharded already.
    """
    if any(is_sharded(module) for module in model.modules()):
        raise RuntimeError("replace_layers comes before fully_shard: layers of a sharded model can't be swapped")
    roles = [roles] if isinstance(roles, str) else list(roles)
    unknown = [role for role in roles if role not in _ROLES]
    if unknown:
        raise ValueError(f"roles {unknown} are not known; known are {', '.join(_ROLES)}")
    replaced = Replaced()
    for role in roles:
        replaced.swapped[role] = []
        _ROLES[role](model, replaced)
    if verbose:
        print(replaced)
    return replaced


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _replace_head(model: nn.Module, replaced: Replaced) -> None:
    names = {id(module): name for name, module in model.named_modules()}
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if head is None:
        replaced.left[type(model).__name__] = "it has no output embeddings"
        return
    name = names[id(head)]
    if isinstance(head, LMHead):
        return
    why = _unlike_a_head(model, head)
    if why:
        replaced.left[name] = why
        return
    ours = LMHead(head.in_features, head.out_features, device="meta", dtype=head.weight.dtype)
    ours.weight = head.weight  # the same parameter: tied embeddings stay tied
    ours.train(head.training)
    model.set_output_embeddings(ours)
    replaced.swapped["head"].append(name)


def _unlike_a_head(model: nn.Module, head: nn.Module) -> str | None:
    if type(head) is not nn.Linear:
        return f"a {type(head).__module__}.{type(head).__name__} and no plain Linear"
    if head.bias is not None:
        return "it has a bias"
    if head.weight.dtype not in _DTYPES:
        return f"it is {head.weight.dtype}, and not of {', '.join(map(str, _DTYPES))}"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
        return "it has hooks"
    if nn.utils.parametrize.is_parametrized(head):
        return "it is parametrized"
    return None


_ROLES: dict[str, Callable[[nn.Module, Replaced], None]] = {"head": _replace_head}
