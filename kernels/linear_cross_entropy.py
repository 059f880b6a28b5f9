"""Head and loss over a vocabulary whose rows are on the peers; the logits are never whole.

    z[t, o n + i] = logit_scale * sum_k h[t, k] W_o[i, k]
    lse[t]        = log sum_v exp z[t, v]                    p[t, v] = exp(z[t, v] - lse[t])
    logp[t]       = z[t, y_t] - lse[t]                       the loss is -logp; 0 where y_t is ignored
    entropy[t]    = -sum_v p[t, v] log p[t, v]

    dz[t, v]  = g_logp[t] (1[v = y_t] - p[t, v]) - g_entropy[t] p[t, v] (log p[t, v] + entropy[t])
    dh[t, k]  = logit_scale * sum_v dz[t, v] W[v, k]
    dW_o[i, k] += logit_scale * sum_t dz[t, o n + i] h[t, k]      into the owner's gradient shard

T tokens, D columns of h, V rows of W, n = ceil(V / R) of them per owner; R owners. It takes one chunk of one owner's
rows at a time, own shard first, then that of rank + 1, ...: pulls it into a local buffer, multiplies it by the library
and adds its logits to a running softmax (online_softmax.py). The backward recomputes the logits, overwrites them by dz,
and adds the chunk's dW to its owner before the next chunk.

[Note: fp32 sums] dh is a sum over chunks: it is accumulated in fp32 by the library's product itself (`addmm` with
`out_dtype`, which takes 16-bit operands with an fp32 sum on CUDA only; elsewhere they are widened first). Rounding
after each chunk would make the result depend on how the vocabulary was cut. `scatter` adds a chunk's dW, also in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .online_softmax import COLUMN_MULTIPLE, SoftmaxState, online_softmax, softmax_grad
from .peers import (
    PeerShards,
    check_alike,
    check_apart,
    check_matrix,
    check_tensor,
    join,
    require_shards,
    rows_per_owner,
)
from .scatter import scatter
from .streams import Device, device_of
from .tiles import ONLINE_SOFTMAX, SoftmaxTile

AddRows = Callable[[int, int, torch.Tensor], None]
_CHUNK_MULTIPLE = 64
_CHUNK_LEAST, _CHUNK_MOST = 512, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOutput:
    """Per token, fp32 [T].

    logp: the target's log-probability; 0 for an ignored target, NaN for one outside the vocabulary.
    lse: the log of the softmax's sum. It and the entropy don't depend on the target.
    entropy: the distribution's.
    """

    logp: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Rows start..stop-1 of an owner's shard; `first`: the first one's index in the vocabulary."""

    owner: int
    start: int
    stop: int
    first: int


def extra_bytes(
    *, chunk: int, tokens: int, columns: int, element_bytes: int, backward: bool, eager: bool = False
) -> int:
    """The peak allocation of a pass, without its arguments and results, with chunks of `chunk` rows.

    The CPU needs no buffers for pulled rows, as it reads them in place.
    """
    held = 2 * chunk * columns * element_bytes + tokens * chunk * element_bytes + 64 * tokens
    if eager:
        held += tokens * chunk * (4 if element_bytes == 4 else 8)  # probabilities; a wide copy of 16-bit logits too
    if backward:
        held += 4 * chunk * columns + (4 * tokens * columns if element_bytes < 4 else 0)  # dW of a chunk; dh in fp32
    return held


def chunk_rows(
    *,
    tokens: int,
    vocabulary: int,
    columns: int,
    world: int,
    element_bytes: int,
    backward: bool,
    eager: bool = False,
) -> int:
    """The number of rows of the vocabulary in a chunk: a multiple of 64, the same for nearly all chunks.

    As many as keep `extra_bytes` within 1/8 of the full logits, at most 4096 (a product that large is efficient) and
    at least 512: with few tokens, whose logits are small anyway, or with a small vocabulary relative to D, it may
    exceed the eighth, as tiny chunks would be slow.
    """
    sizes = {"tokens": tokens, "columns": columns, "element_bytes": element_bytes, "backward": backward}
    sizes["eager"] = eager
    fixed = extra_bytes(chunk=0, **sizes)
    per_row = extra_bytes(chunk=1, **sizes) - fixed
    most = (tokens * vocabulary * element_bytes // 8 - fixed) // per_row // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE
    most = min(max(most, _CHUNK_LEAST), _CHUNK_MOST)
    owned = rows_per_owner(vocabulary, world)
    even = -(-owned // -(-owned // most))
    return -(-even // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE


@torch.no_grad()
def linear_cross_entropy(
    *,
    h: torch.Tensor,
    weight: PeerShards,
    targets: torch.Tensor,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    chunk: int | None = None,
    eager: bool | None = None,
    tile: SoftmaxTile = ONLINE_SOFTMAX,
) -> HeadOutput:
    """Log-probabilities of `targets` under the head `weight`, whose logits are never whole.

    Two ranks own W = [[1], [0]] and [[0]]. h = [[ln 2]] has the logits [ln 2, 0 | 0], so the probabilities [1/2, 1/4 |
    1/4]: for the target 0, logp = ln 1/2 = -0.693 and the entropy is 1.040.

    The host never synchronises, so a target outside the vocabulary is not refused: its `logp` is NaN.

    h: [T, D], contiguous; T may be 0.
    weight: [V, D], of h's dtype (fp32, bf16, fp16).
    targets: int64 [T].
    ignore_index: a target that counts for nothing.
    logit_scale: multiplies the logits.
    chunk: rows of the vocabulary at a time, a multiple of 16; by default chosen from the sizes.
    eager: computes the softmax in plain torch, the default on the CPU.
    tile: sizes of the softmax kernel's tiles.

    Raises ValueError for other shapes, dtypes, devices or layouts, before a launch.
    """
    _check_head(h, weight, targets, logit_scale, chunk)
    tokens = h.shape[0]
    targets = targets.contiguous()
    state = SoftmaxState.of(tokens, h.device)
    if tokens:
        eager = not h.is_cuda if eager is None else eager
        chunk = chunk or _default_chunk(h, weight, backward=False, eager=eager)
        logits = h.new_empty(tokens, chunk)
        for part, rows in pulled(weight, parts_of(weight, chunk), chunk):
            logits_TV = logits[:, : len(rows)]
            torch.mm(h, rows.t(), out=logits_TV)
            online_softmax(
                logits=logits_TV,
                first=part.first,
                targets=targets,
                state=state,
                scale=logit_scale,
                eager=eager,
                tile=tile,
            )
    logp, lse, entropy = state.result()
    return HeadOutput(logp=logp.masked_fill_(targets == ignore_index, 0.0), lse=lse, entropy=entropy)


@torch.no_grad()
def linear_cross_entropy_grad(
    *,
    h: torch.Tensor,
    weight: PeerShards,
    targets: torch.Tensor,
    output: HeadOutput,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None = None,
    gradient: PeerShards | AddRows | None,
    dh: torch.Tensor | None,
    ignore_index: int = -100,
    logit_scale: float = 1.0,
    chunk: int | None = None,
    eager: bool | None = None,
    tile: SoftmaxTile = ONLINE_SOFTMAX,
) -> None:
    """Writes the gradient of h into `dh` and adds that of the weight into `gradient`; None for a frozen one.

    In the example of `linear_cross_entropy`, g_logp = [1] makes the gradient of the logits [1/2, -1/4 | -1/4]. Times h
    = ln 2 it is added to the shards: [[0.347], [-0.173]] to rank 0's, [[-0.173]] to rank 1's. dh = [[1/2]].

    A token whose `logp` is NaN has a NaN gradient.

    h, weight, targets, ignore_index, logit_scale, chunk, eager, tile: as in `linear_cross_entropy`.
    output: what that returned for the same arguments.
    g_logp, g_entropy: fp32 [T], the loss's gradient with respect to its fields.
    gradient: [V, D], to which other ranks may add at the same time, or a function that adds fp32 rows to an owner's
        from `start` on: `gradient(owner, start, rows)`.
    dh: [T, D] in h's dtype or in fp32, which saves a separate fp32 sum.

    Raises ValueError as `linear_cross_entropy` does.
    """
    _check_head(h, weight, targets, logit_scale, chunk)
    _check_gradients(h, weight, output, g_logp, g_entropy, gradient, dh)
    if h.shape[0] == 0 or (gradient is None and dh is None):
        return
    eager = not h.is_cuda if eager is None else eager
    chunk = chunk or _default_chunk(h, weight, backward=True, eager=eager)
    targets, g_logp = targets.contiguous(), g_logp.contiguous()
    g_entropy = None if g_entropy is None else g_entropy.contiguous()
    logits = h.new_empty(h.shape[0], chunk)
    gradients = HeadGradients(h, gradient, dh, chunk)
    for part, rows in pulled(weight, parts_of(weight, chunk), chunk):
        dz_TV = logits[:, : len(rows)]
        torch.mm(h, rows.t(), out=dz_TV)
        softmax_grad(
            logits=dz_TV,
            first=part.first,
            vocabulary=weight.shape[0],
            targets=targets,
            lse=output.lse.contiguous(),
            entropy=output.entropy.contiguous(),
            g_logp=g_logp,
            g_entropy=g_entropy,
            ignore_index=ignore_index,
            scale=logit_scale,
            eager=eager,
            tile=tile,
        )
        gradients.add(part, rows, dz_TV)
    gradients.finish()


class HeadGradients:
    """dh and dW of a head, from each chunk's dz; either may be None, not needed. `wide`: the dtype of the sums."""

    def __init__(
        self,
        h: torch.Tensor,
        gradient: PeerShards | AddRows | None,
        dh: torch.Tensor | None,
        chunk: int,
        wide: torch.dtype = torch.float32,
    ) -> None:
        self._h, self._gradient, self._dh = h, gradient, dh
        self._dw = None if gradient is None else h.new_empty(chunk, h.shape[1], dtype=wide)
        self._dh_sum = dh if dh is None or dh.dtype == wide else torch.empty_like(dh, dtype=wide)
        if self._dh_sum is not None:
            self._dh_sum.zero_()

    def add(self, part: VocabularyPart, rows: torch.Tensor, dz_TV: torch.Tensor) -> None:
        if self._dh_sum is not None:
            add_product(self._dh_sum, dz_TV, rows, beta=1)
        if self._gradient is not None:
            dw_VD = self._dw[: len(rows)]
            add_product(dw_VD, dz_TV.t(), self._h, beta=0)
            if isinstance(self._gradient, PeerShards):
                scatter(gradient=dw_VD, peers=rows_of(self._gradient, part))
            else:
                self._gradient(part.owner, part.start, dw_VD)

    def finish(self) -> None:
        if self._dh_sum is not self._dh:
            self._dh.copy_(self._dh_sum)


def _default_chunk(h: torch.Tensor, weight: PeerShards, *, backward: bool, eager: bool) -> int:
    return chunk_rows(
        tokens=h.shape[0],
        vocabulary=weight.shape[0],
        columns=h.shape[1],
        world=weight.world,
        element_bytes=h.element_size(),
        backward=backward,
        eager=eager,
    )


def parts_of(weight: PeerShards, chunk: int) -> list[VocabularyPart]:
    """All rows of the vocabulary, in the order in which `rank` takes them."""
    return [
        VocabularyPart(owner, start, min(start + chunk, weight.rows(owner)), owner * weight.rows_per_owner + start)
        for owner in ((weight.rank + index) % weight.world for index in range(weight.world))
        for start in range(0, weight.rows(owner), chunk)
    ]


def pulled(
    weight: PeerShards, parts: Sequence[VocabularyPart], chunk: int, on: Device | None = None
) -> Iterator[tuple[VocabularyPart, torch.Tensor]]:
    """Every part, of at most `chunk` rows, with its rows: own ones in place, others' in one of two buffers, until the
    next is asked for.
    On the CPU all are in place: there is no link. `on`: a device to use instead of a GPU, to simulate one.

    On a GPU the next part is pulled on another stream while the caller's work on the current one runs. A pull waits for
    the caller's work that was enqueued before: on the part before the current one, whose buffer it reuses.
    """
    own = weight.shards[weight.rank]
    on = on or device_of(own)
    far = weight.world > 1 and on is not None
    buffers = [own.new_empty(chunk, weight.shape[1]) for _ in range(2 if far else 0)]
    compute, pull = (None, None) if on is None else (on.current(), on.pull_stream())

    def start(index: int) -> tuple[torch.Tensor, Any]:
        part = parts[index]
        rows = weight.shards[part.owner][part.start : part.stop]
        if part.owner == weight.rank or pull is None:
            return rows, None
        buffer = buffers[index % 2][: len(rows)]
        pull.wait_stream(compute)
        on.enqueue(pull, partial(buffer.copy_, rows, non_blocking=True))
        return buffer, pull.record_event()

    try:
        coming = start(0)
        for index, part in enumerate(parts):
            rows, arrived = coming
            if index + 1 < len(parts):
                coming = start(index + 1)
            if arrived is not None:
                compute.wait_event(arrived)
            yield part, rows
    finally:  # even if the caller left early: the buffers' memory goes back to the caller's stream
        if pull is not None:
            compute.wait_stream(pull)


def rows_of(peers: PeerShards, part: VocabularyPart) -> PeerShards:
    """A part of one owner's rows, as shards. The address is computed on the device, without a synchronisation."""
    rows = peers.shards[part.owner][part.start : part.stop]
    skipped_bytes = part.start * peers.row_elements * rows.element_size()
    table = peers.table[part.owner : part.owner + 1] + skipped_bytes
    near = frozenset({0} if part.owner in peers.near else ())
    return PeerShards(table=table, shape=tuple(rows.shape), rank=0, dtype=rows.dtype, near=near, exact=peers.exact)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int) -> None:
    """out = beta out + a b, summed in fp32; see [Note: fp32 sums]."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=torch.float32, beta=beta, out=out)
    else:
        torch.addmm(out, a.float(), b.float(), beta=beta, out=out)


def _check_head(
    h: torch.Tensor, weight: PeerShards, targets: torch.Tensor, logit_scale: float, chunk: int | None
) -> None:
    check_matrix(weight)
    if 0 in weight.shape:
        raise ValueError(f"the weight is {weight.shape}; give [V, D] with V and D at least 1")
    check_tensor("h", h, shape=(*h.shape[:1], weight.shape[1]), dtype=weight.dtype, device=weight.device)
    check_tensor("targets", targets, shape=(len(h),), dtype=torch.int64, device=weight.device, contiguous=False)
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale is {logit_scale}; give a finite number")
    if chunk is not None and (chunk <= 0 or chunk % COLUMN_MULTIPLE):
        raise ValueError(f"chunk is {chunk}; give a positive multiple of {COLUMN_MULTIPLE}, or None")


def _check_gradients(
    h: torch.Tensor,
    weight: PeerShards,
    output: HeadOutput,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None,
    gradient: PeerShards | AddRows | None,
    dh: torch.Tensor | None,
) -> None:
    per_token = {"output.lse": output.lse, "output.entropy": output.entropy, "g_logp": g_logp, "g_entropy": g_entropy}
    for name, value in per_token.items():
        if value is not None:
            of = {"shape": (len(h),), "dtype": torch.float32, "device": h.device}
            check_tensor(name, value, **of, contiguous=False)
    if dh is not None:
        check_tensor("dh", dh, shape=tuple(h.shape), dtype=(h.dtype, torch.float32), device=h.device)
        check_apart("dh", dh, h, weight, *per_token.values())
    check_gradient(gradient, weight)


def check_gradient(gradient: PeerShards | AddRows | None, weight: PeerShards) -> None:
    """Raises ValueError for shards that are not those of a gradient of `weight`."""
    require_shards("the gradient", gradient)
    if isinstance(gradient, PeerShards):
        check_alike("the gradient", gradient, "weight", weight, shape=weight.shape, dtype=gradient.sum_dtype)


def linear_cross_entropy_ref(
    h: torch.Tensor, weight: list[torch.Tensor], targets: torch.Tensor, ignore_index: int, logit_scale: float
) -> HeadOutput:
    """The same in plain torch, over all owners' shards, in float64. Targets are in the vocabulary or ignored."""
    z = logit_scale * (h.double() @ join(weight).double().T)
    lse = z.logsumexp(1)
    log_p = z - lse[:, None]
    ignored = targets == ignore_index
    logp = log_p.gather(1, targets.masked_fill(ignored, 0)[:, None])[:, 0].masked_fill(ignored, 0.0)
    return HeadOutput(logp=logp, lse=lse, entropy=-(log_p.exp() * log_p).sum(1))


def linear_cross_entropy_grad_ref(
    h: torch.Tensor,
    weight: list[torch.Tensor],
    targets: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor,
    ignore_index: int,
    logit_scale: float,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """dh and every owner's dW in plain torch, in float64."""
    whole = join(weight).double()
    z = logit_scale * (h.double() @ whole.T)
    log_p = z.log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1, keepdim=True)
    ignored = targets == ignore_index
    g = g_logp.double().masked_fill(ignored, 0.0)[:, None]
    hit = torch.nn.functional.one_hot(targets.masked_fill(ignored, 0), len(whole))
    dz = logit_scale * (g * (hit - p) - g_entropy.double()[:, None] * p * (log_p + entropy))
    return dz @ whole, list((dz.T @ h.double()).split([len(shard) for shard in weight]))
