"""`compute_in_chunks`: MLPs and norms of checkpointed layers run on a chunk of tokens at a time.

[Note: chunks] A layer's recomputation is kept while it runs backward: of the MLP several tensors of [tokens,
intermediate size], of each norm copies in fp32. Both are functions of single tokens, so here they keep their input
alone, and compute the rest once more in their backward, a chunk of tokens at a time. A recomputation stops at the last
tensor that was saved; as the input is saved first, it does not compute an MLP at the end of its layer for nothing.

A weight's gradient is summed over the chunks, at least in fp32, and reaches the weight once. Only an operator of
`replace_layers` on a weight that is never whole adds the gradient of each chunk to the owners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers.modeling_layers import GradientCheckpointingLayer

from ..nn.families import FusedProjections
from ..nn.operand import is_sharded, resolve

TOKENS = 4096  # keeps a GPU busy, and reads and adds weights rarely


def compute_in_chunks(model: nn.Module, tokens: int = TOKENS) -> list[str]:
    """Runs MLPs and norms of a transformers model on `tokens` tokens at a time.

    They do so in layers that are checkpointed (`model.gradient_checkpointing_enable({"use_reentrant": False})`), and
    without gradients; elsewhere, in compiled layers and for fewer tokens nothing changes. No tensor of [tokens,
    intermediate size] is then ever whole. Loss and gradients are the same, up to the rounding of sums over tokens.

    Call it after PEFT and `replace_layers`, before or after `fully_shard`; a second call changes `tokens`. Mixtures of
    experts stay whole, as some also return their router's logits, and so do linear layers outside of an MLP (OPT).

    Returns the names of these modules. Raises ValueError for `tokens` below 1.
    """
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"tokens is {tokens!r}; give the tokens of a chunk, 1 or more")
    changed = []
    for name, part, layer in list(_parts(model)):
        run = part.forward.run if isinstance(part.forward, _Chunks) else part.forward
        vars(part)["forward"] = _Chunks(part, run, layer, tokens)  # assigned plainly, it would be a submodule
        changed.append(name)
    return changed


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """MLPs and norms, each with its name and a layer that shows whether it is checkpointed."""
    layer = next((each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)), None)
    if layer is None:
        return
    for name, module in model.named_modules():
        layer = module if isinstance(module, GradientCheckpointingLayer) else layer
        for key, part in module.named_children():
            is_mlp = module is layer and key in ("mlp", "feed_forward") and not hasattr(part, "experts")
            # transformers' own norms: torch's make no copies, and a fused projection reads the weights of its norms.
            is_norm = type(part).__name__.endswith("Norm") and not type(part).__module__.startswith("torch.")
            if is_mlp or (is_norm and not isinstance(module, FusedProjections)):
                yield f"{name}.{key}".lstrip("."), part, layer


class _Chunks(nn.Module):
    """A module's forward in chunks. `run`: the whole one; `layer`: shows whether it is checkpointed."""

    def __init__(self, of: nn.Module, run: Callable[..., Any], layer: nn.Module, tokens: int) -> None:
        super().__init__()
        self.of, self.run, self.tokens = of, run, tokens
        self._layer = [layer]  # in a list, so that it is no submodule

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Any:
        few = max(x.shape[:-1]) <= self.tokens
        kept = torch.is_grad_enabled() and not self._layer[0].gradient_checkpointing
        if few or kept or others or named or torch.compiler.is_compiling() or self._has_units():
            return self.run(x, *others, **named)
        saved = _Saved.apply(x.new_empty(0, requires_grad=True), x)
        return _InChunks.apply(self, [saved], x, *self.trained().values())  # in a list: not an input with a gradient

    def _has_units(self) -> bool:
        """True if parts of the module are units themselves, whose weights can't be stood in for."""
        return any(is_sharded(each) or isinstance(each, FSDPModule) for each in [*self.of.modules()][1:])

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.named_parameters() if each.requires_grad}

    def split(self, tensor: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        """Views by chunks of tokens, the longest dimension of `like`: [1, T, K], [1, T, H, D] or [1, H, T, D]."""
        return tensor.split(self.tokens, like.shape.index(max(like.shape[:-1])))


class _Saved(torch.autograd.Function):
    """Saves x before anything is computed from it; autograd saves a function's tensors after its forward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return anchor.view_as(anchor)


class _InChunks(torch.autograd.Function):
    """See [Note: chunks]. `saved`: a tensor whose node has saved x, for as long as the tensor lives."""

    @staticmethod
    def forward(ctx: Any, chunks: _Chunks, saved: list[Tensor], x: Tensor, *weights: nn.Parameter) -> Tensor:
        kind = x.device.type
        (ctx.saved,), ctx.chunks, ctx.random = saved, chunks, (torch.get_rng_state(), *get_device_states(x))
        # Without the cache, which would keep casts that were made without gradients for later uses with them.
        ctx.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "cache_enabled": False}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(kind)
        out: Tensor | None = None
        with torch.autocast(**ctx.autocast):
            for at, rows in enumerate(chunks.split(x, x)):
                y: Tensor = chunks(rows)
                out = y.new_empty(*x.shape[:-1], y.shape[-1]) if out is None else out
                chunks.split(out, x)[at].copy_(y)
        assert out is not None, "x has one chunk or more"
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        chunks, (x,), (state, devices, states) = ctx.chunks, ctx.saved.grad_fn.saved_tensors, ctx.random
        weights, dx = chunks.trained(), torch.empty_like(x)
        never_whole = [name for name, each in weights.items() if getattr(each, "_odc_never_whole", False)]
        adding = [weights[name] for name in never_whole if resolve(weights[name]._odc_handle).wants_gradient()]
        # Stand-ins, whose gradients reach no hook.
        own = {name: each.detach().requires_grad_() for name, each in weights.items() if name not in never_whole}
        sums: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices, device_type=x.device.type), torch.autocast(**ctx.autocast):
            torch.set_rng_state(state)
            set_device_states(devices, states, device_type=x.device.type)
            for rows, dy_rows, dx_rows in zip(*(chunks.split(each, x) for each in (x, dy, dx)), strict=True):
                rows = rows.detach().requires_grad_()
                with torch.enable_grad():
                    y = functional_call(chunks, own, (rows,))
                torch.autograd.backward(y, dy_rows, inputs=[rows, *own.values(), *adding])
                dx_rows.copy_(rows.grad)
                for name, each in own.items():
                    if each.grad is not None:
                        wide = torch.promote_types(each.dtype, torch.float32)
                        sums[name] = sums[name].add_(each.grad) if name in sums else each.grad.to(wide)
                        each.grad = None
        return None, None, dx, *(sums[name].to(each.dtype) if name in sums else None for name, each in weights.items())
