"""transformers' experts on sharded parameters: each expert is read from its owner, its gradient is added there.

All families have one interface: parameters [E, …], one matrix an expert, and a forward of tokens, experts and weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..base.untyped import untyped
from .choice import TABLE, Entry, choices
from .functional.experts import gated, grouped_linear, grouped_product
from .functional.whole import table_of
from .modules import ReadsShards, leaf

Factors = tuple[torch.Tensor, torch.Tensor, float]

# transformers' own, which all compute the same.
_FUNCTIONS = (None, "eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe")


class Experts(ReadsShards):
    """A mixin of a family's experts. Without `fully_shard`, or if its weights are gathered, the family's forward runs.

    `gate`: of kernels, which computes the same as the family's, see `gated`; () for none.
    """

    operator = "experts"
    gate: Sequence[float] = ()
    factors: dict[str, list[Factors]]  # of adapters that are active, by parameter

    @property
    def names(self) -> list[str]:
        up = "gate_up_proj" if self.has_gate else "up_proj"
        return [up, "down_proj", *((f"{up}_bias", "down_proj_bias") if self.has_bias else ())]

    def reads_on_demand(self, device_type: str, table: tuple[Entry, ...] = TABLE) -> tuple[str, ...]:
        return () if self._ask("is_gathered", device_type, table) else tuple(self.names)

    def keeps_rows(self, device_type: str, table: tuple[Entry, ...] = TABLE) -> bool:
        return self._ask("reads_copies", device_type, table) and not self._ask("is_gathered", device_type, table)

    def _ask(self, what: str, device_type: str, table: tuple[Entry, ...]) -> bool:
        """A property of a choice, of both projections: one is enough, as a layer is gathered or read on demand."""
        shapes = (tuple(leaf(self, name).shape) for name in self.names[:2])
        how: Any = {"device_type": device_type, "given": self.choice, "table": table}
        return any(getattr(each, what) for shape in shapes for each in choices("experts", shape=shape, **how))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [T, H]; top_k_index, top_k_weights: [T, k] -> [T, H]."""
        down, device_type = leaf(self, "down_proj"), hidden_states.device.type
        is_sharded, table = getattr(down, "_odc_handle", None) is not None, table_of(down)
        if not self.factors and (not is_sharded or self._ask("is_gathered", device_type, table)):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        tokens, top_k = top_k_index.shape
        experts, order = top_k_index.reshape(-1).sort(stable=True)
        offsets = torch.searchsorted(experts, torch.arange(len(down) + 1, device=experts.device)).to(torch.int32)
        x = hidden_states[order // top_k]
        up = self.names[0]
        if self.gate and is_sharded and up not in self.factors and self._ask("is_by_kernel", device_type, table):
            x = self._project(up, x, offsets, gate=self.gate)
        else:
            x = self._project(up, x, offsets)
            x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = self._project("down_proj", x, offsets)
        if getattr(self, "has_post_expert_norm", False):
            x = self.post_expert_norm(x)
        x = x * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return x[back].view(tokens, top_k, x.shape[-1]).sum(1).to(hidden_states.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self._odc_plain, Experts), self.__dict__

    @staticmethod
    def adapt_wrappers(model: nn.Module) -> None:
        """PEFT's wrappers of our experts become `AdaptedExperts`, also those that came after `replace_layers`."""
        for module in model.modules():
            wraps = hasattr(module, "get_delta_factors") and isinstance(untyped(module).get_base_layer(), Experts)
            if wraps and not isinstance(module, AdaptedExperts):
                untyped(module).__class__ = with_ours(type(module), AdaptedExperts)

    def _project(self, name: str, x: torch.Tensor, offsets: torch.Tensor, gate: Sequence[float] = ()) -> torch.Tensor:
        bias = leaf(self, f"{name}_bias") if self.has_bias else None
        how: Any = {"transposed": self.is_transposed, "gate": gate, "choice": self.choice}
        y = grouped_linear(x, offsets, leaf(self, name), bias, **how)
        for left, right, scaling in self.factors.get(name, ()):  # of W + scaling * left @ right
            first, second = (left, right) if self.is_transposed else (right.mT, left.mT)
            inner = grouped_product(x.to(first.dtype), offsets, first)
            y = y + scaling * grouped_product(inner, offsets, second)
        return y


class AdaptedExperts(nn.Module):
    """A mixin of PEFT's wrapper of a parameter: experts get the factors of its change, not the changed parameter."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (vars(type(self))["_odc_plain"], AdaptedExperts), self.__dict__

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        wrapper: Any = self
        experts, name = wrapper.get_base_layer(), wrapper.parameter_name
        experts.factors[name] = [wrapper.get_delta_factors(each) for each in active_adapters if each in wrapper.lora_A]
        try:
            yield
        finally:
            del experts.factors[name]


def why_not(module: Any) -> str | None:
    """The reason why ours would not compute the same as these experts; None if it does."""
    if not is_of_the_interface(module):
        return f"a {type(module).__name__}, not run by transformers' ExpertsInterface, or derived from one that is"
    if "forward" in vars(module):
        return "its forward was replaced"
    if (function := module.config._experts_implementation) not in _FUNCTIONS:
        return f"it runs by the function {function!r}"
    if module.down_proj.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return f"it is {module.down_proj.dtype}"
    if getattr(module, "_is_expert_parallel", False) or len(module.down_proj) != module.num_experts:
        return "its experts are distributed over ranks already"
    return None


def are_experts(module: nn.Module) -> bool:
    """True if it has a matrix for each expert."""
    down = module._parameters.get("down_proj")
    return down is not None and down.ndim == 3


def is_of_the_interface(module: nn.Module) -> bool:
    """True if its own class, none that it is derived from, is one that transformers runs by its ExpertsInterface."""
    return hasattr(vars(type(module)).get("forward"), "__wrapped__") and hasattr(module, "is_transposed")


@functools.cache
def with_ours(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """That class with ours in front: still a subclass, for code that looks for the class."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "_odc_plain": kind})


def _new(kind: type[nn.Module], mixin: type[nn.Module]) -> nn.Module:
    return object.__new__(with_ours(kind, mixin))


@torch.no_grad()
def gate_of(module: Any) -> Sequence[float]:
    """The kernels' gate that equals the module's own on some numbers; () if none does."""
    if not module.has_gate:
        return ()
    probe = torch.linspace(-9.0, 9.0, 64, dtype=torch.float64, device="cpu").view(16, 4).T
    probe = probe * torch.tensor([[1.0], [1.0], [30.0], [1000.0]], device="cpu")  # beyond any limit
    limit, alpha = (float(getattr(module, name, 0.0) or 0.0) for name in ("limit", "alpha"))
    for gate in ((0.0, 1.0, 0.0), (0.0, 1.0, 1.0), (limit, alpha, 0.0), (limit, alpha, 1.0)):
        own = module._apply_gate(probe)
        if own.shape == (4, 8) and torch.allclose(own, gated(probe, gate), rtol=1e-9, atol=1e-9):
            return gate
    return ()
