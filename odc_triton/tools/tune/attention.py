"""The time of a FLOP of attention in those of linear layers, for the planner's cost model."""

from __future__ import annotations

import statistics
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
from .workload import Workload


def measure_attention(
    decoder: Decoder, layers: Mapping[Workload, int], *, counts: Sequence[int], rounds: int, **where: Any
) -> float:
    """By forward and backward of one layer's packed attention and of the blocks' matrices, on documents of `counts`
    tokens; by turns, of which the median counts. `where`: dtype and device.
    """
    random, heads, kv = partial(torch.randn, requires_grad=True, **where), decoder.heads, decoder.kv_heads
    linear = [(w, n) for w, n in layers.items() if w.operator in ("linear", "qkv")]
    weights = [(random(w.shape[0] + 2 * w.kv_rows, w.shape[1]), n) for w, n in linear]
    elements = sum(n * weight.numel() for weight, n in weights)
    found: tuple[list, list] = ([], [])
    for tokens in counts:
        sizes = ((heads, decoder.key_width), (kv, decoder.key_width), (kv, decoder.value_width))
        qkv = [random(1, number, tokens, width) for number, width in sizes]
        ends = torch.tensor([0, tokens], dtype=torch.int32, device=where["device"])
        attend = partial(packed_attention, nn.Module(), *qkv, None, cu_seq_lens_q=ends, max_length_q=tokens)
        multiply = [(partial(F.linear, random(tokens, weight.shape[1]), weight), n) for weight, n in weights]
        turns = [
            (_seconds(lambda attend=attend: attend()[0]), sum(n * _seconds(each) for each, n in multiply))
            for _ in range(rounds + 1)
        ]
        flops = 3.0 * heads * (decoder.key_width + decoder.value_width) * tokens**2, 6.0 * elements * tokens
        for timings, work, seconds in zip(
            found, flops, zip(*turns[1:], strict=True), strict=True
        ):  # the first warms up
            timings.append((work, statistics.median(seconds)))
    return attention_factor(*found)


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    began = time.perf_counter()
    out = work()
    out.backward(torch.ones_like(out))
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
