"""`AttentionOfTree` on a GPU, by torch's FlashAttention for sequences of different lengths, in bf16 or fp16.

The equations are those of `attention.py`. One causal call computes all documents on their own keys. The other parts
need a call per depth of the tree: a call takes parts of one source whose queries and keys both ascend, as views of the
tensors given, so no key is copied. What lies between two parts becomes sequences of their own:

    parts   queries 2..5 see keys 0..2, queries 8..9 see keys 5..7
    call    queries 2..9, keys 0..7:  (2..5, 0..2)  (5..8, none)  (none, 2..5)  (8..9, 5..7)

[Note: empty sequences] FlashAttention computes these too. Queries without keys get output 0 and a log-sum-exp of
+inf (FlashAttention 2) or -inf (3), and their gradient is 0, as is that of keys without queries. But a row in no
sequence, or past the longest length that is given, is never written. So the lengths between parts count too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from .attention import AttentionPart, Pair, RowsBefore, by_head, by_token, sources

# Private, but since torch 2.11 they differ in optional arguments only, and nothing public takes a log-sum-exp.
_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernel on the keys of `source`. `ends`: (row of queries, row of keys) at which the first of its
    sequences starts and each ends.
    """

    source: int
    is_causal: bool
    ends: list[tuple[int, int]]

    @property
    def queries(self) -> slice:
        return slice(self.ends[0][0], self.ends[-1][0])

    @property
    def keys(self) -> slice:
        return slice(self.ends[0][1], self.ends[-1][1])

    def fits(self, part: AttentionPart) -> bool:
        queries, keys = self.ends[-1]
        return self.source == part.source and queries <= part.start and keys <= part.low

    def add(self, part: AttentionPart) -> None:
        for end in ((part.start, self.ends[-1][1]), (part.start, part.low), (part.end, part.high)):
            if end != self.ends[-1]:
                self.ends.append(end)


def calls_of(parts: Sequence[AttentionPart]) -> list[KernelCall]:
    """The documents' own parts, which cover all rows in order, in the first call; then the others', by source."""
    calls = [KernelCall(source=0, is_causal=True, ends=[(0, 0)])]
    for part in sorted(parts, key=lambda part: (part.source, part.start, part.low)):
        if part.is_own:
            call = calls[0]
        elif (call := next((each for each in calls[1:] if each.fits(part)), None)) is None:
            calls.append(call := KernelCall(part.source, is_causal=False, ends=[(part.start, part.low)]))
        call.add(part)
    return calls


class FlashAttentionOfTree(torch.autograd.Function):
    """query [1, H, T, D], keys and values [1, Hkv, T, D] of a pack, on CUDA, in bf16 or fp16, to [1, H, T, D].

    `parts`: rows start..end see rows low..high of `source`: 0 is the pack, the others are `before`'s, whose gradients
    it adds. Every row is in one own part, which is causal; the others are not. Parts are joined, and their gradients
    added, in fp32. Saved: what goes in, `out` and `lse`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        parts: Sequence[AttentionPart],
        scale: float | None,
        before: RowsBefore | None,
    ) -> torch.Tensor:
        calls = calls_of(parts)
        ctx.calls = [*zip(calls, _sequences(calls, query.device), strict=True)]
        ctx.scale, ctx.before, q = scale, before, by_token(query)
        for source, pair in sources(keys, values, before):
            pair = [by_token(each) for each in pair]
            for call, sequences in (each for each in ctx.calls if each[0].source == source):
                k, v = (each[call.keys] for each in pair)
                options = (*sequences, 0.0, call.is_causal, False)  # dropout, causal, debug
                more, theirs, *state, _ = _forward(q[call.queries], k, v, *options, scale=scale)
                if call.is_causal:
                    out, lse, ctx.state = more.to(torch.promote_types(q.dtype, torch.float32)), theirs, state
                    continue
                theirs = theirs.masked_fill(theirs.isinf(), -torch.inf)  # see [Note: empty sequences]
                mine = lse[:, call.queries]
                share = torch.sigmoid(theirs - mine)  # exp(theirs - joined)
                out[call.queries].lerp_(more.to(out.dtype), share.T[..., None])
                lse[:, call.queries] = torch.logaddexp(mine, theirs)
        # Rows first in memory, for the layer after it, and as the backward would else copy it for each call.
        out = by_head(out.to(query.dtype).contiguous())
        ctx.save_for_backward(query, keys, values, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, keys, values, out, lse = ctx.saved_tensors
        gradient, q, out = by_token(gradient).contiguous(), by_token(query), by_token(out)
        of_query = torch.zeros_like(q, dtype=lse.dtype)

        def gradients(source: int, pair: Pair) -> list[torch.Tensor]:
            rows = [by_token(each) for each in pair]
            found = [torch.zeros_like(each, dtype=lse.dtype) for each in rows]
            for call, sequences in (each for each in ctx.calls if each[0].source == source):
                k, v = (each[call.keys] for each in rows)
                joined = out[call.queries], lse[:, call.queries].contiguous()  # of which the kernel takes no strides
                given = (gradient[call.queries], q[call.queries], k, v, *joined, *sequences, 0.0, call.is_causal)
                places = of_query[call.queries], *(each[call.keys] for each in found)
                for place, each in zip(places, _backward(*given, *ctx.state, scale=ctx.scale), strict=True):
                    place += each
            return [by_head(each) for each in found]

        own = [by_head(of_query), *gradients(0, (keys, values))]
        if ctx.before is not None:
            pairs = ctx.before.each(backward=True)
            ctx.before.add(((number, gradients(number, pair)) for number, pair in pairs), ctx.needs_input_grad[1:3])
        return *(each.to(query.dtype) for each in own), None, None, None


def _sequences(calls: list[KernelCall], device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """For each call int32 [sequences + 1] on `device`, where its queries' and keys' sequences end, and the longest.

    One copy for all calls, for which the host doesn't wait. The longest is at least 2: FlashAttention 2 takes 1 to mean
    that every sequence has a query (its issue 1537).
    """
    ends = [[end - side[0] for end in side] for call in calls for side in zip(*call.ends, strict=True)]
    longest = [max((end - start for start, end in pairwise(side)), default=0) for side in ends]
    on_host = torch.tensor([end for side in ends for end in side], dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = on_host.to(device, non_blocking=True).split([len(side) for side in ends])
    firsts = range(0, len(ends), 2)
    return [(on_device[at], on_device[at + 1], max(longest[at], 2), max(longest[at + 1], 2)) for at in firsts]
