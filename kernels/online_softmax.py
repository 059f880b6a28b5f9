"""The softmax of logits that arrive a chunk of columns at a time, and the gradient of its log-probabilities.

    z_v = scale logits[t, v]        v = first .. first + count - 1 in this chunk
    m = max_v z_v    s = sum_v exp(z_v - m)    q = sum_v exp(z_v - m) (z_v - m)    z_y, the target's

    lse = m + log s    logp = z_y - lse    entropy = -sum_v p_v log p_v = log s - q / s    p_v = exp(z_v - lse)

    dlogits[t, v] = scale [ g_logp (1[v = y] - p_v) - g_entropy p_v (log p_v + entropy) ]

T tokens; one running m, s, q, z_y for each, in fp32 whatever the logits' dtype. With q about the maximum, neither term
of the entropy is large where the logits are, so their difference is exact to fp32's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .tiles import ONLINE_SOFTMAX, SoftmaxTile

COLUMN_MULTIPLE = 16
"""Rows of logits begin at multiples of this many elements, so that loads of 2-byte values are joined into vectors."""

LOWEST = -1e30  # below any logit, yet finite: -inf minus -inf is not a number
_DEEP = -200.0  # a log-probability: its exp is 0 in fp32, and 0 times it is 0 where -inf would give NaN
VECTOR = tl.constexpr(COLUMN_MULTIPLE)


@triton.jit
def load_scaled(logits, t_in, v, count, scale):
    """The logits of columns `v` in fp32, scaled; -inf from `count` on.

    It reads up to the next multiple of 16 columns, so that loads stay vectors for any `count`, and discards the rest.
    """
    readable = tl.cdiv(count, VECTOR) * VECTOR
    z = tl.load(logits, mask=t_in[:, None] & (v < readable)[None, :], other=0.0).to(tl.float32)
    known = (v < count)[None, :]
    return tl.where(known, tl.where(known, z, 0.0) * scale, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "count", "first"])
def online_softmax_kernel(
    logits,
    targets,
    maximum,
    total,
    moment,
    picked,
    scale,
    tokens,
    stride,
    count,
    first,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < tokens
    y = tl.load(targets + t, mask=t_in, other=-1) - first
    m = tl.load(maximum + t, mask=t_in, other=0.0)
    s = tl.load(total + t, mask=t_in, other=0.0)
    q = tl.load(moment + t, mask=t_in, other=0.0)
    z_y = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for start in range(0, count, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        z = load_scaled(logits + t[:, None] * stride + v[None, :], t_in, v, count, scale)
        higher = tl.maximum(m, tl.max(z, axis=1))
        above = z - higher[:, None]
        p = tl.exp(above)
        shrink = tl.exp(m - higher)
        q = shrink * (q + (m - higher) * s) + tl.sum(p * tl.where(p > 0, above, 0.0), axis=1)
        s = shrink * s + tl.sum(p, axis=1)
        m = higher
        z_y += tl.sum(tl.where(v[None, :] == y[:, None], z, 0.0), axis=1)
    tl.store(maximum + t, m, mask=t_in)
    tl.store(total + t, s, mask=t_in)
    tl.store(moment + t, q, mask=t_in)
    tl.store(picked + t, z_y, mask=t_in & (y >= 0) & (y < count))


@triton.jit(do_not_specialize=["tokens", "count", "first", "vocabulary", "ignore_index"])
def softmax_grad_kernel(
    logits,
    targets,
    lse,
    entropy,
    g_logp,
    g_entropy,
    scale,
    tokens,
    stride,
    count,
    first,
    vocabulary,
    ignore_index,
    HAS_ENTROPY: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    t_in = t < tokens
    target = tl.load(targets + t, mask=t_in, other=0)
    log_total = tl.load(lse + t, mask=t_in, other=0.0)
    g = tl.load(g_logp + t, mask=t_in, other=0.0)
    g = tl.where((target >= 0) & (target < vocabulary), g, float("nan"))
    g = tl.where(target == ignore_index, 0.0, g)
    y = target - first
    if HAS_ENTROPY:
        ent = tl.load(entropy + t, mask=t_in, other=0.0)
        g_ent = tl.load(g_entropy + t, mask=t_in, other=0.0)
    writable = tl.cdiv(count, VECTOR) * VECTOR  # as `load_scaled` reads
    for start in range(0, count, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        pointers = logits + t[:, None] * stride + v[None, :]
        log_p = load_scaled(pointers, t_in, v, count, scale) - log_total[:, None]
        p = tl.exp(log_p)
        dz = g[:, None] * (tl.where(v[None, :] == y[:, None], 1.0, 0.0) - p)
        if HAS_ENTROPY:
            dz -= g_ent[:, None] * p * tl.where(p > 0, log_p + ent[:, None], 0.0)
        tl.store(pointers, (dz * scale).to(logits.dtype.element_ty), mask=t_in[:, None] & (v < writable)[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxState:
    """m, s, q and z_y of the columns seen so far, fp32 [T] each; z_y is NaN until the target's column has been seen."""

    maximum: torch.Tensor
    total: torch.Tensor
    moment: torch.Tensor
    picked: torch.Tensor

    @classmethod
    def of(cls, tokens: int, device: torch.device, dtype: torch.dtype = torch.float32) -> SoftmaxState:
        """Before the first chunk."""

        def full(value: float) -> torch.Tensor:
            return torch.full((tokens,), value, dtype=dtype, device=device)

        return cls(maximum=full(LOWEST), total=full(0.0), moment=full(0.0), picked=full(float("nan")))

    def result(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """logp, lse and entropy after the last chunk."""
        log_total = self.total.log()
        return self.picked - self.maximum - log_total, self.maximum + log_total, log_total - self.moment / self.total


def online_softmax(
    *,
    logits: torch.Tensor,
    first: int,
    targets: torch.Tensor,
    state: SoftmaxState,
    scale: float,
    eager: bool = False,
    tile: SoftmaxTile = ONLINE_SOFTMAX,
) -> None:
    """Adds the columns `first` .. of the logits to `state`. logits: [T, count], targets: int64 [T], contiguous.

    Logits [ln 2, 0 | 0] of two ranks come in two calls. After the first the maximum is ln 2 and the sum of
    exp(z - maximum) is 1.5; after the second, with first = 2, the sum is 2: logsumexp = ln 2 + ln 2.

    Rows of the logits must begin at multiples of 16 elements and have memory up to the next such multiple after
    `count`; ValueError otherwise. The contents of fp32 logits are undefined afterwards. `eager`: in plain torch.
    """
    _check_rows(logits)
    tokens, count = logits.shape
    if tokens == 0:
        return
    if eager:
        z = logits.to(state.maximum.dtype).mul_(scale)
        higher = torch.maximum(state.maximum, z.amax(1))
        fall = state.maximum - higher
        y = targets - first
        here = (y >= 0) & (y < z.shape[1])
        z_y = z.gather(1, y.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        above = z.sub_(higher[:, None])
        p = above.exp()
        shrink = fall.exp()
        state.moment.addcmul_(fall, state.total).mul_(shrink)
        state.moment.add_(above.clamp_(min=_DEEP).mul_(p).sum(1))
        state.total.mul_(shrink).add_(p.sum(1))
        state.maximum.copy_(higher)
        state.picked.copy_(torch.where(here, z_y, state.picked))
        return
    online_softmax_kernel[(triton.cdiv(tokens, tile.t),)](
        logits,
        targets,
        state.maximum,
        state.total,
        state.moment,
        state.picked,
        scale,
        tokens,
        logits.stride(0),
        count,
        first,
        BLOCK_T=tile.t,
        BLOCK_V=tile.v,
        num_warps=tile.num_warps,
    )


def softmax_grad(
    *,
    logits: torch.Tensor,
    first: int,
    vocabulary: int,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor | None,
    ignore_index: int,
    scale: float,
    eager: bool = False,
    tile: SoftmaxTile = ONLINE_SOFTMAX,
) -> None:
    """Overwrites the columns `first` .. of the logits by their gradient; rows and `eager` as in `online_softmax`.

    For the target 0 and g_logp = [1] of that example the columns 0 and 1 become [1/2, -1/4], and column 2, in the call
    with first = 2, becomes [-1/4].

    lse, entropy, g_logp, g_entropy: fp32 [T], contiguous. A target that is neither in 0..vocabulary-1 nor
    `ignore_index` makes the token's gradient NaN, as its log-probability is.
    """
    _check_rows(logits)
    tokens, count = logits.shape
    if tokens == 0:
        return
    if eager:
        g = g_logp.masked_fill((targets < 0) | (targets >= vocabulary), torch.nan)
        g = g.masked_fill(targets == ignore_index, 0.0)
        log_p = logits.float().mul_(scale).sub_(lse[:, None])
        p = log_p.exp()
        if g_entropy is not None:
            of_entropy = log_p.clamp_(min=_DEEP).add_(entropy[:, None]).mul_(p).mul_(g_entropy[:, None])
        dz = p.mul_(-g[:, None])
        y = targets - first
        here = (y >= 0) & (y < dz.shape[1])
        dz.scatter_add_(1, y.clamp(0, dz.shape[1] - 1)[:, None], torch.where(here, g, 0.0)[:, None])
        if g_entropy is not None:
            dz.sub_(of_entropy)
        logits.copy_(dz.mul_(scale))
        return
    softmax_grad_kernel[(triton.cdiv(tokens, tile.t),)](
        logits,
        targets,
        lse,
        entropy,
        g_logp,
        g_logp if g_entropy is None else g_entropy,
        scale,
        tokens,
        logits.stride(0),
        count,
        first,
        vocabulary,
        ignore_index,
        HAS_ENTROPY=g_entropy is not None,
        BLOCK_T=tile.t,
        BLOCK_V=tile.v,
        num_warps=tile.num_warps,
    )


def _check_rows(logits: torch.Tensor) -> None:
    if logits.ndim != 2 or logits.stride(1) != 1 or logits.stride(0) % COLUMN_MULTIPLE:
        raise ValueError(
            f"the logits are {tuple(logits.shape)} with strides {logits.stride()}; give two dimensions, with rows that "
            f"begin at multiples of {COLUMN_MULTIPLE} elements"
        )
