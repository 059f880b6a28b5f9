"""The divergence of two heads over vocabularies whose rows are on the peers; neither's logits are ever whole.

    p = softmax(z), the student's, q = softmax(u), the teacher's; z and u as in linear_cross_entropy.py
    log m[t, v] = log((1 - beta) p + beta q)        so m = p for beta = 0, m = q for beta = 1
    A[t] = sum_v q (log q - log m)    E[t] = sum_v p (log p - log m)

    beta = 0: KL(q || p), D = A       1: KL(p || q), D = E       between: Jensen-Shannon, D = beta A + (1 - beta) E
    dz[t, v] = g[t] (p - q)           g[t] p (log p - log m - E), for beta < 1 times 1 - beta

The forward takes the rows of both heads twice, first for the log-sum-exps, then for A and E. The backward, of the
student alone, takes them once more. All else is as in linear_cross_entropy.py. Words that only one head has are
padding: they don't count. In plain torch heads may be in fp64, which is computed in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .linear_cross_entropy import AddRows, HeadGradients, VocabularyPart, check_gradient, chunk_rows, parts_of, pulled
from .online_softmax import LOWEST, VECTOR, SoftmaxState, load_scaled, online_softmax
from .peers import COMPUTE_DTYPES, PeerShards, check_apart, check_tensor, require_shards
from .tiles import DIVERGENCE, SoftmaxTile

_LEAST = tl.constexpr(LOWEST)  # of a log-probability: its exp is 0, and 0 times it is 0 where -inf would give NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInput:
    """Logits scale · h Wᵀ.

    h: [T, D], contiguous.
    weight: [V, D], of h's dtype.
    """

    h: torch.Tensor
    weight: PeerShards
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceOutput:
    """Per token, [T] in fp32, for heads in fp64 in fp64.

    divergence, own: D, and E, which its gradient needs.
    lse, lse_teacher: the logs of both softmaxes' sums.
    """

    divergence: torch.Tensor
    own: torch.Tensor
    lse: torch.Tensor
    lse_teacher: torch.Tensor


@triton.jit(do_not_specialize=["tokens", "count"])
def divergence_kernel(
    student,
    teacher,
    lse,
    lse_teacher,
    theirs,
    own,
    scale,
    scale_teacher,
    log_share,
    log_share_teacher,
    tokens,
    stride,
    stride_teacher,
    count,
    IS_GRAD: tl.constexpr,
    IS_FORWARD_KL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Adds a chunk's part of A to `theirs` and of E to `own`. IS_GRAD: the student's logits become dz; `theirs` is g
    times 1 - beta, `own` is E.
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < tokens
    total = tl.load(lse + t, mask=t_in, other=0.0)[:, None]
    total_teacher = tl.load(lse_teacher + t, mask=t_in, other=0.0)[:, None]
    a = tl.load(theirs + t, mask=t_in, other=0.0)
    e = tl.load(own + t, mask=t_in, other=0.0)
    for start in range(0, count, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        at = student + t[:, None] * stride + v[None, :]
        at_teacher = teacher + t[:, None] * stride_teacher + v[None, :]
        log_p = load_scaled(at, t_in, v, count, scale) - total
        log_q = load_scaled(at_teacher, t_in, v, count, scale_teacher) - total_teacher
        log_p = tl.maximum(log_p, _LEAST, propagate_nan=tl.PropagateNan.ALL)
        log_q = tl.maximum(log_q, _LEAST, propagate_nan=tl.PropagateNan.ALL)
        p, q = tl.exp(log_p), tl.exp(log_q)
        of_p, of_q = log_p + log_share, log_q + log_share_teacher
        higher = tl.maximum(of_p, of_q)
        log_m = higher + tl.log(tl.exp(of_p - higher) + tl.exp(of_q - higher))
        if IS_GRAD:
            dz = p - q if IS_FORWARD_KL else p * (log_p - log_m - e[:, None])
            in_row = t_in[:, None] & (v < tl.cdiv(count, VECTOR) * VECTOR)[None, :]  # as `load_scaled` reads
            tl.store(at, (a[:, None] * scale * dz).to(student.dtype.element_ty), mask=in_row)
        else:
            a += tl.sum(q * (log_q - log_m), axis=1)
            e += tl.sum(p * (log_p - log_m), axis=1)
    if not IS_GRAD:
        tl.store(theirs + t, a, mask=t_in)
        tl.store(own + t, e, mask=t_in)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitChunks:
    """Both heads' logits, a chunk of the vocabulary at a time."""

    student: HeadInput
    teacher: HeadInput
    beta: float
    chunk: int
    eager: bool
    tile: SoftmaxTile

    def __iter__(self) -> Iterator[tuple[VocabularyPart, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The student's part of the vocabulary, its rows and logits, and the teacher's logits of the same words."""
        heads = self.student, self.teacher
        parts = zip(*_common_parts(heads[0].weight, heads[1].weight, self.chunk), strict=True)
        buffers = [each.h.new_empty(len(each.h), self.chunk) for each in heads]
        rows = [pulled(each.weight, of_head, self.chunk) for each, of_head in zip(heads, parts, strict=True)]
        for (part, own), (_, theirs) in zip(*rows, strict=True):
            z, u = (each[:, : len(own)] for each in buffers)
            torch.mm(heads[0].h, own.t(), out=z)
            torch.mm(heads[1].h, theirs.t(), out=u)
            yield part, own, z, u

    def add(self, z: torch.Tensor, u: torch.Tensor, sums: DivergenceOutput, *, is_grad: bool = False) -> None:
        """What the kernel does; `sums.divergence` are `theirs`."""
        shares = [math.log(each) if each else LOWEST for each in (1 - self.beta, self.beta)]
        totals, scales = (sums.lse, sums.lse_teacher), (self.student.scale, self.teacher.scale)
        if self.eager:
            log_p, log_q = (
                logits.to(total.dtype).mul(scale).sub_(total[:, None]).clamp_(min=LOWEST)
                for logits, total, scale in zip((z, u), totals, scales, strict=True)
            )
            log_m = torch.logaddexp(log_p + shares[0], log_q + shares[1])
            if not is_grad:
                sums.divergence.add_(log_q.exp().mul_(log_q.sub_(log_m)).sum(1))
                sums.own.add_(log_p.exp().mul_(log_p.sub_(log_m)).sum(1))
                return
            p = log_p.exp()
            dz = p.mul_(log_p.sub_(log_m).sub_(sums.own[:, None])) if self.beta else p.sub_(log_q.exp_())
            z.copy_(dz.mul_(sums.divergence[:, None]).mul_(scales[0]))
            return
        divergence_kernel[(triton.cdiv(len(z), self.tile.t),)](
            *(z, u, *totals, sums.divergence, sums.own, *scales, *shares),
            *(len(z), z.stride(0), u.stride(0), z.shape[1]),
            IS_GRAD=is_grad,
            IS_FORWARD_KL=self.beta == 0,
            BLOCK_T=self.tile.t,
            BLOCK_V=self.tile.v,
            num_warps=self.tile.num_warps,
        )


@torch.no_grad()
def linear_divergence(
    *,
    student: HeadInput,
    teacher: HeadInput,
    beta: float = 0.5,
    chunk: int | None = None,
    eager: bool | None = None,
    tile: SoftmaxTile = DIVERGENCE,
) -> DivergenceOutput:
    """The divergence D between the distributions of two heads, for each token, and what its gradient needs.

    Of two words the student's logits are [ln 3, 0], so p = [3/4, 1/4], and the teacher's [0, 0], so q = [1/2, 1/2]. For
    beta = 0, D = 1/2 ln 2/3 + 1/2 ln 2 = 0.144.

    student, teacher: heads of the same tokens; words that only one of them has don't count.
    beta: 0 for KL(teacher || student), 1 for KL(student || teacher), between them Jensen-Shannon.
    chunk: words at a time, a multiple of 16; by default as many as keep memory near 1/8 of one head's logits.
    eager: in plain torch, the default on the CPU.
    tile: sizes of the softmax kernel's tiles.

    Raises ValueError for other shapes, dtypes or devices.
    """
    chunks = _chunks(student, teacher, beta, chunk, eager, tile)
    wide = torch.promote_types(student.h.dtype, torch.float32)
    states = [SoftmaxState.of(len(each.h), each.h.device, wide) for each in (student, teacher)]
    if len(student.h):
        nothing = torch.full((len(student.h),), -1, device=student.h.device)  # no target
        for part, _, z, u in chunks:
            for logits, state, head in ((z, states[0], student), (u, states[1], teacher)):
                online_softmax(
                    logits=logits, first=part.first, targets=nothing, state=state, scale=head.scale,
                    eager=chunks.eager, tile=tile,
                )  # fmt: skip
    _, lse, _ = states[0].result()
    _, lse_teacher, _ = states[1].result()
    zeros = torch.zeros_like(lse)
    output = DivergenceOutput(divergence=zeros, own=zeros.clone(), lse=lse, lse_teacher=lse_teacher)
    if len(student.h):
        for _, _, z, u in chunks:
            chunks.add(z, u, output)
    output.divergence.mul_(beta or 1.0).add_(output.own, alpha=(1 - beta) or 1.0)
    return output


@torch.no_grad()
def linear_divergence_grad(
    *,
    student: HeadInput,
    teacher: HeadInput,
    beta: float = 0.5,
    output: DivergenceOutput,
    g: torch.Tensor,
    gradient: PeerShards | AddRows | None,
    dh: torch.Tensor | None,
    chunk: int | None = None,
    eager: bool | None = None,
    tile: SoftmaxTile = DIVERGENCE,
) -> None:
    """Writes the gradient of the student's h into `dh` and adds that of its weight to `gradient`; None: not needed.

    In the example of `linear_divergence`, g = [1] makes the gradient of the student's logits p - q = [1/4, -1/4].

    student, teacher, beta, chunk, eager, tile: as in `linear_divergence`.
    output: what that returned for the same arguments.
    g: [T], of the output's dtype.
    gradient, dh: as in `linear_cross_entropy_grad`.
    """
    chunks = _chunks(student, teacher, beta, chunk, eager, tile)
    h, wide = student.h, output.lse.dtype
    check_apart("dh", dh, h, g, teacher.h, student.weight, teacher.weight)
    check_gradient(gradient, student.weight)
    check_tensor("g", g, shape=(len(h),), dtype=wide, device=h.device, contiguous=False)
    if not len(h) or (gradient is None and dh is None):
        return
    sums = DivergenceOutput(
        divergence=g * ((1 - beta) or 1.0), own=output.own, lse=output.lse, lse_teacher=output.lse_teacher
    )
    gradients = HeadGradients(h, gradient, dh, chunks.chunk, wide)
    for part, rows, z, u in chunks:
        chunks.add(z, u, sums, is_grad=True)
        gradients.add(part, rows, z)
    gradients.finish()


def _chunks(
    student: HeadInput, teacher: HeadInput, beta: float, chunk: int | None, eager: bool | None, tile: SoftmaxTile
) -> _LogitChunks:
    for name, head in (("student", student), ("teacher", teacher)):
        weight = head.weight
        require_shards(f"the {name}'s weight", weight)
        if len(weight.shape) != 2 or 0 in weight.shape or weight.dtype not in (*COMPUTE_DTYPES, torch.float64):
            raise ValueError(f"the {name}'s weight is {weight.dtype} {weight.shape}; give [V, D] of a floating dtype")
        of = {"shape": (*head.h.shape[:1], weight.shape[1]), "dtype": weight.dtype, "device": weight.device}
        check_tensor(f"the {name}'s h", head.h, **of)
    h = student.h
    eager = not h.is_cuda if eager is None else eager
    found = [(len(each.h), str(each.h.device)) for each in (student, teacher)]
    if found[0] != found[1]:
        raise ValueError(f"the student has (tokens, device) {found[0]}, the teacher {found[1]}; give the same")
    if torch.float64 in (h.dtype, teacher.h.dtype) and not eager:
        raise ValueError("the heads are in float64, which is computed in plain torch: leave eager out, on the CPU")
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; it must be between 0 and 1")
    if chunk is None:
        sizes = {"columns": h.shape[1] + teacher.h.shape[1], "world": student.weight.world}
        sizes |= {"element_bytes": h.element_size(), "backward": True, "eager": eager}
        chunk = -(-chunk_rows(tokens=len(h), vocabulary=student.weight.shape[0], **sizes) // 32) * 16
    return _LogitChunks(student=student, teacher=teacher, beta=beta, chunk=chunk, eager=eager, tile=tile)


def _common_parts(own: PeerShards, other: PeerShards, chunk: int) -> list[tuple[VocabularyPart, VocabularyPart]]:
    """The words that both have, each part in one owner's rows of both, as they may be cut otherwise."""
    found = []
    for part in parts_of(own, chunk):
        first, stop = part.first, min(part.first + part.stop - part.start, other.shape[0])
        while first < stop:
            owner, start = divmod(first, other.rows_per_owner)
            count, at = min(stop - first, other.rows(owner) - start), part.start + first - part.first
            found.append(
                (VocabularyPart(part.owner, at, at + count, first), VocabularyPart(owner, start, start + count, first))
            )
            first += count
    return found
