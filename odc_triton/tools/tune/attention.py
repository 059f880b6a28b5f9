"""The time of a FLOP of attention, and of a recurrent layer's rule, in those of linear layers, for the cost model."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...packs.attention import packed_attention
from ...plan.cost import attention_factor
from ...plan.decoder import Decoder
from ...plan.recurrence import RecurrentSizes
from .workload import Workload

RULES = {
    "delta": "torch_chunk_gated_delta_rule",
    "kda": "chunk_kimi_delta_attention",
    "mamba2": "mamba2_chunk_scan",
}  # in a modeling module of transformers, which finds kernels by these names


def measure_attention(decoder: Decoder, layers: Mapping[Workload, int], *, counts: Sequence[int], **how: Any) -> float:
    """By forward and backward of one layer's packed attention and of the blocks' matrices, on documents of `counts`
    tokens; by turns, of which the median counts. `how`: number of rounds, dtype and device.
    """

    def attend(random: Callable[..., torch.Tensor], tokens: int) -> Callable[[], torch.Tensor]:
        heads, kv, width = decoder.heads, decoder.kv_heads, decoder.key_width
        sizes = ((heads, width), (kv, width), (kv, decoder.value_width))
        qkv = [random(1, number, tokens, width) for number, width in sizes]
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=how["device"])
        call = partial(packed_attention, nn.Module(), *qkv, None, cu_seq_lens_q=ends, max_length_q=tokens)
        return lambda: call()[0]

    per_token = 3.0 * decoder.heads * (decoder.key_width + decoder.value_width)
    return _factor(attend, [per_token * tokens**2 for tokens in counts], layers, counts, **how)


def measure_rule(
    sizes: RecurrentSizes, module: nn.Module, layers: Mapping[Workload, int], *, counts: Sequence[int], **how: Any
) -> float:
    """The same of the rule of a recurrent layer, `module`."""
    function = getattr(sys.modules[type(module).__module__], RULES[sizes.rule])

    def recur(random: Callable[..., torch.Tensor], tokens: int) -> Callable[[], torch.Tensor]:
        keys = [random(1, tokens, sizes.key_heads, sizes.key_width) for _ in range(2)]
        values, step = random(1, tokens, sizes.heads, sizes.value_width), random(1, tokens, sizes.heads)
        if sizes.rule == "mamba2":
            decay = random(sizes.heads)
            return lambda: function(values, step.sigmoid(), -decay.exp(), *keys, chunk_size=module.chunk_size)
        decay = random(*(keys[0].shape if sizes.rule == "kda" else step.shape))
        on = {"use_qk_l2norm_in_kernel": True}
        return lambda: function(*keys, values, g=-decay.exp(), beta=step.sigmoid(), **on)[0]

    return _factor(recur, [3.0 * sizes.flops * tokens for tokens in counts], layers, counts, **how)


def _factor(
    make: Callable[..., Callable[[], torch.Tensor]],
    flops: Sequence[float],
    layers: Mapping[Workload, int],
    counts: Sequence[int],
    *,
    rounds: int,
    **where: Any,
) -> float:
    random = partial(torch.randn, requires_grad=True, **where)
    linear = [(w, n) for w, n in layers.items() if w.operator in ("linear", "qkv")]
    weights = [(random(w.shape[0] + 2 * w.kv_rows, w.shape[1]), n) for w, n in linear]
    elements = sum(n * weight.numel() for weight, n in weights)
    found: tuple[list, list] = ([], [])
    for tokens, work in zip(counts, flops, strict=True):
        call = make(random, tokens)
        multiply = [(partial(F.linear, random(tokens, weight.shape[1]), weight), n) for weight, n in weights]
        turns = [(_seconds(call), sum(n * _seconds(each) for each, n in multiply)) for _ in range(rounds + 1)]
        both = zip(found, (work, 6.0 * elements * tokens), zip(*turns[1:], strict=True), strict=True)
        for timings, each, seconds in both:  # the first turn warms up
            timings.append((each, statistics.median(seconds)))
    return attention_factor(*found)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    out = work()
    out.backward(torch.ones_like(out))
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
