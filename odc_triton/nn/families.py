"""transformers' attention layers on the fused projection: one table line per family, the rest is the family's code."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .functional.qkv import is_fused
from .modules import Linear, has_hooks, head_norm, leaf, project

_OUTPUT = "o_proj"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", _OUTPUT)
HEAD_DIMS = (16, 32, 64, 128, 256)  # that the kernel supports


def _window(attention: Any) -> dict[str, Any]:
    of_model = getattr(attention.config, "sliding_window", None)
    return {"sliding_window": getattr(attention, "sliding_window", of_model)}  # some layers may have none


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family's attention class. `of`: as in the name of its class; `norm`: whether q and k have one per head;
    `options`: arguments of its attention function that not all families have.
    """

    of: str
    norm: bool = False
    options: Callable[[Any], dict[str, Any]] = lambda attention: {}

    @property
    def module(self) -> str:
        """The module that defines it."""
        return "transformers.models.{0}.modeling_{0}".format(self.of.lower())

    @property
    def name(self) -> str:
        return f"{self.of}Attention"

    @property
    def attention(self) -> type[nn.Module] | None:
        """The class, or None if its module was not imported, so that no model can have it."""
        return getattr(sys.modules.get(self.module), self.name, None)


FAMILIES = (
    Family(of="Llama"),
    Family(of="Mistral", options=_window),
    Family(of="Qwen2", options=_window),
    Family(of="Qwen3", options=_window, norm=True),
)


class FusedProjections(nn.Module):
    """A mixin of a family's attention class: one kernel computes q, k and v, if chosen.

    The rest, the chosen attention function with its mask and the cache, is as in the family's own forward, which runs
    if nothing is fused.
    """

    _odc_family: Family
    _odc_choice: str
    config: Any
    o_proj: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if position_embeddings is None or not self._is_fused(hidden_states):
            return super().forward(
                hidden_states,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                **kwargs,
            )
        cache = kwargs.pop("past_key_values", None)
        cache = kwargs.pop("cache", cache)  # its name from transformers 5.24 on
        norm = head_norm(self) if self._odc_family.norm else None
        heads = project(self, hidden_states, *position_embeddings, norm=norm, choice=self._odc_choice)
        query, key, value = (each.transpose(1, 2) for each in heads)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        home = sys.modules[self._odc_family.module]
        attend = home.ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, home.eager_attention_forward
        )
        out, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **self._odc_family.options(self),
            **kwargs,
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    def _is_fused(self, x: torch.Tensor) -> bool:
        projections = [getattr(self, name) for name in _PROJECTIONS[:3]]
        if not all(_is_untouched(each, Linear) for each in projections) or _unlike_norms(self, self._odc_family):
            return False  # LoRA's layers, for example, must be called
        if torch.nn.modules.module._has_any_global_hook():  # a FLOP counter, for example, must see the calls
            return False
        parameters = [p for each in projections for p in (leaf(each, "weight"), leaf(each, "bias")) if p is not None]
        return is_fused(x, parameters, self._odc_choice)


def family_of(module: nn.Module) -> Family | None:
    """The family whose attention class, or a class derived from it, the module has."""
    for family in FAMILIES:
        attention = family.attention
        if attention is not None and isinstance(module, attention):
            return family
    return None


def why_not(module: Any, family: Family) -> str | None:
    """The reason why our layer would not compute the same as this module of that family; None if it does."""
    if type(module) is not family.attention:
        return f"a {type(module).__module__}.{type(module).__name__}, derived from {family.name}"
    if "forward" in vars(module):
        return "its forward was replaced"
    wanted = {*_PROJECTIONS, *(("q_norm", "k_norm") if family.norm else ())}
    if set(module._modules) != wanted or module._parameters or module._buffers:
        others = sorted({*module._modules, *module._parameters, *module._buffers} ^ wanted)
        return f"its parts differ from {family.name}'s by {', '.join(others)}"
    for name in _PROJECTIONS:
        part = module._modules[name]
        if name == _OUTPUT and type(part).__module__.startswith("peft."):
            continue  # it is only called
        if type(part) not in (nn.Linear, Linear):
            return f"its {name} is a {type(part).__module__}.{type(part).__name__}"
        if not _is_untouched(part, nn.Linear, Linear):
            return f"its {name} has hooks, or another forward than its class"
    if why := _unlike_norms(module, family):
        return why
    biases = {module._modules[name].bias is None for name in _PROJECTIONS[:3]}
    if len(biases) > 1:
        return "of q_proj, k_proj and v_proj some have a bias and some have none"
    if module.head_dim not in HEAD_DIMS:
        return f"its heads have {module.head_dim} elements; the kernel supports {', '.join(map(str, HEAD_DIMS))}"
    if module.q_proj.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it is {module.q_proj.weight.dtype}"
    return None


def _is_untouched(part: nn.Module, *kinds: type[nn.Module]) -> bool:
    """True if it is exactly of one of these classes and calling it runs no user code."""
    return type(part) in kinds and "forward" not in vars(part) and not has_hooks(part)


def _unlike_norms(module: Any, family: Family) -> str | None:
    """The reason why the norms of the heads, if any, are not the family's own."""
    if not family.norm:
        return None
    norms = module.q_norm, module.k_norm
    own = getattr(sys.modules[family.module], f"{family.of}RMSNorm")
    if not all(_is_untouched(norm, own) for norm in norms):
        return f"its q_norm or k_norm is not a {own.__name__}, or has hooks, or another forward than its class"
    if norms[0].variance_epsilon != norms[1].variance_epsilon:
        return "its q_norm and k_norm have different eps"
    return None


@functools.cache
def fused_class(family: Family) -> type[nn.Module]:
    """The family's class with `FusedProjections` in front: still a subclass, for hooks that look for the class."""
    name, bases = f"Fused{family.name}", (FusedProjections, family.attention or nn.Module)
    return type(name, bases, {"__module__": __name__, "_odc_family": family})


@torch.no_grad()
def differs(module: Any, family: Family) -> str | None:
    """The difference of our forward from the family's own, on a small module of this kind; None if they are equal.

    Both run on the same random weights and inputs, in plain torch. So a change of attention in a transformers release
    is detected before anything is replaced.
    """
    config = copy.deepcopy(module.config)
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    for name, size in sizes.items():
        if name != "head_dim" or hasattr(config, "head_dim"):
            setattr(config, name, size)
    if not hasattr(config, "head_dim"):
        config.hidden_size = 64
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        own = type(module)(config, module.layer_idx).float().eval()
        fp32: Any = {"dtype": torch.float32}
        for parameter in own.parameters():
            parameter.copy_(torch.randn(parameter.shape, **fp32) / 4)
        x = torch.randn(2, 5, config.hidden_size, **fp32)
        cos, sin = torch.randn(2, 1, 5, own.head_dim // 2, **fp32).repeat(1, 1, 1, 2).unbind()
        mask = torch.full((5, 5), -1e9, **fp32).triu(1)[None, None]
        want = own(x, position_embeddings=(cos, sin), attention_mask=mask)[0]
        own.__class__ = _always_fused(family)
        own._odc_choice = "qkv=eager"
        got = own(x, position_embeddings=(cos, sin), attention_mask=mask)[0]
    error = float((got - want).norm() / want.norm())
    return None if error <= 1e-5 else f"{family.name} of this transformers computes something else, by {error:.1e}"


def _always_fused(family: Family) -> type[nn.Module]:
    return type(family.name, (fused_class(family),), {"_is_fused": lambda self, x: True})
