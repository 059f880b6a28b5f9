"""The head with its loss, against float64 autograd over the unsharded head and the reference over all shards."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support import place  # isort: skip

from odc_kernels.linear_cross_entropy import (
    HeadOutput,
    chunk_rows,
    extra_bytes,
    linear_cross_entropy,
    linear_cross_entropy_grad,
    linear_cross_entropy_grad_ref,
    linear_cross_entropy_ref,
)
from odc_kernels.online_softmax import SoftmaxTile
from odc_kernels.peers import PeerShards, join
from tests.support.peak_memory import peak_bytes
from tests.support.place import split

pytestmark = place.MARKS


# tokens, vocabulary, columns: several chunks an owner, odd, aligned, one word, no token, owners without rows.
SHAPES = [(33, 100, 24), (5, 7, 3), (1, 16, 16), (4, 1, 5), (0, 4, 4), (17, 3, 40)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CASES = place.matrix(SHAPES, DTYPES, mixed=[(33, 100, 24)])
EAGER = pytest.mark.parametrize("eager", [False, True], ids=["kernel", "eager"])  # plain torch, not the kernels
TILE = SoftmaxTile(t=16, v=16)
SCALE, IGNORE = 0.7, -100

# The inputs below make logits that every dtype holds exactly, so what is left is fp32's rounding of logits of up to
# some tens (forward). In the gradients dz is rounded to the dtype; for bf16 the interpreter cuts off there where a GPU
# rounds.
FORWARD_TOLERANCE = 5e-6
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}


# Gradients of a vocabulary of one are zero in exact arithmetic.
close = partial(place.close, least=0.1)


def head(tokens: int, vocabulary: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """h and the whole weight on a grid so coarse that sums of their products are exact in bf16."""
    h = torch.randint(-1, 2, (tokens, columns)).to(dtype)
    return h, (torch.randint(-4, 5, (vocabulary, columns)) / 8).to(dtype)


def targets_of(tokens: int, vocabulary: int, world: int) -> torch.Tensor:
    """Random ones; among them, where there is room, owners' first and last rows, and ignored ones."""
    each = -(-vocabulary // world)
    borders = [row for owner in range(world) for row in (owner * each, owner * each + each - 1) if row < vocabulary]
    targets = torch.randint(0, vocabulary, (tokens,))
    special = torch.tensor([*borders, vocabulary - 1, IGNORE, IGNORE])[:tokens]
    targets[: len(special)] = special
    return targets[torch.randperm(tokens)]


def oracle(
    h: torch.Tensor,
    whole: torch.Tensor,
    targets: torch.Tensor,
    g_logp: torch.Tensor,
    g_entropy: torch.Tensor,
    scale: float = SCALE,
) -> tuple[HeadOutput, torch.Tensor, torch.Tensor]:
    """Outputs, dh and dW by autograd over the unsharded head, in float64."""
    h, whole = h.double().requires_grad_(), whole.double().requires_grad_()
    z = scale * (h @ whole.T)
    logp = -F.cross_entropy(z, targets, ignore_index=IGNORE, reduction="none")
    entropy = -(z.softmax(1) * z.log_softmax(1)).sum(1)
    (g_logp * logp + g_entropy * entropy).sum().backward()
    output = HeadOutput(logp=logp.detach(), lse=z.logsumexp(1).detach(), entropy=entropy.detach())
    return output, h.grad, whole.grad


def check_output(got: HeadOutput, want: HeadOutput, tolerance: float = FORWARD_TOLERANCE) -> None:
    for name in ("logp", "lse", "entropy"):
        assert getattr(got, name).dtype == torch.float32
        close(getattr(got, name), getattr(want, name), tolerance, name)


def arguments(h: torch.Tensor, weight: PeerShards, targets: torch.Tensor, **changes: object) -> dict[str, Any]:
    """Of forward and backward alike: several chunks and tiles."""
    given = {"h": h, "weight": weight, "targets": targets, "chunk": 16, "tile": TILE, "eager": False}
    return given | changes


@contextlib.contextmanager
def synchronising_raises() -> Iterator[None]:
    """On a GPU, any wait of the host for the device raises; elsewhere there is none."""
    if place.INTERPRETED:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients(
    h: torch.Tensor, whole: torch.Tensor, targets: torch.Tensor, g_logp: torch.Tensor, *, world: int = 2, **changes: Any
) -> tuple[HeadOutput, torch.Tensor, torch.Tensor]:
    """Output, dh and what was added to the gradient. On 2 ranks dh is fp32, which a head of 16 bits may have too, and
    the gradient held zeros, so that sums can be compared bitwise.
    """
    before, dh_dtype = (torch.zeros(whole.shape), torch.float32) if world == 2 else (torch.randn(whole.shape), h.dtype)
    rank, dh = world // 2, torch.full(h.shape, torch.nan, dtype=dh_dtype)
    gradient = split(before, world)
    both = arguments(h, PeerShards.of(split(whole, world), shape=whole.shape, rank=rank), targets, **changes)
    g_entropy = both.pop("g_entropy", None)
    with synchronising_raises():
        output = linear_cross_entropy(**both)
        linear_cross_entropy_grad(
            **both,
            output=output,
            g_logp=g_logp,
            g_entropy=g_entropy,
            gradient=PeerShards.of(gradient, shape=whole.shape, rank=rank),
            dh=dh,
        )
    return output, dh, join(gradient) - before


@EAGER
@pytest.mark.parametrize(("world", "shape", "dtype"), CASES)
def test_outputs_and_gradients(world: int, shape: tuple, dtype: torch.dtype, eager: bool) -> None:
    tokens, vocabulary, _ = shape
    h, whole = head(*shape, dtype)
    targets = targets_of(tokens, vocabulary, world)
    g_logp, g_entropy = torch.randn(tokens), torch.randn(tokens)
    how = {"g_entropy": g_entropy, "logit_scale": SCALE, "eager": eager}
    output, dh, dw = gradients(h, whole, targets, g_logp, world=world, **how)

    want, want_dh, want_dw = oracle(h, whole, targets, g_logp, g_entropy)
    check_output(output, want)
    close(dh, want_dh, TOLERANCE[dtype], "dh")
    close(dw, want_dw, TOLERANCE[dtype], "dW")
    shards = split(whole, world)
    ref_dh, ref_dw = linear_cross_entropy_grad_ref(h, shards, targets, g_logp, g_entropy, IGNORE, SCALE)
    check_output(output, linear_cross_entropy_ref(h, shards, targets, IGNORE, SCALE))
    close(dh, ref_dh, TOLERANCE[dtype], "dh against the reference")
    close(dw, torch.cat(ref_dw), TOLERANCE[dtype], "dW against the reference")


@pytest.mark.parametrize("with_logp", [True, False])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_each_gradient_alone(with_logp: bool, with_entropy: bool) -> None:
    h, whole = head(9, 21, 6, torch.float32)
    targets = targets_of(9, 21, 2)
    g_logp, g_entropy = torch.randn(9) * with_logp, torch.randn(9) * with_entropy
    _, dh, dw = gradients(h, whole, targets, g_logp, g_entropy=g_entropy if with_entropy else None, logit_scale=SCALE)
    _, want_dh, want_dw = oracle(h, whole, targets, g_logp, g_entropy)
    close(dh, want_dh, TOLERANCE[torch.float32], "dh")
    close(dw, want_dw, TOLERANCE[torch.float32], "dW")


@EAGER
@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 30.0), (torch.float16, -0.5), (torch.bfloat16, 1.0)], ids=str
)
def test_large_logits(dtype: torch.dtype, scale: float, eager: bool) -> None:
    """±80 before the scale: a softmax that is not about its maximum overflows, one whose entropy isn't loses it."""
    h = torch.tensor([[80.0, 0.0], [-80.0, 0.0], [80.0, 1.0], [0.0, 80.0]]).to(dtype)
    whole = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).to(dtype)
    targets = torch.tensor([0, 0, 3, 4])
    # All of one size: a token's error is held against the largest gradient, which is another token's.
    g_logp, g_entropy = torch.tensor([1.0, -1.0, 2.0, -2.0]), torch.tensor([-1.0, 2.0, 1.0, -2.0])
    output, dh, dw = gradients(h, whole, targets, g_logp, g_entropy=g_entropy, logit_scale=scale, eager=eager)
    want, want_dh, want_dw = oracle(h, whole, targets, g_logp, g_entropy, scale)
    check_output(output, want, 1e-6)
    # p comes from lse, of up to 2401, which fp32 holds to 1e-4.
    close(dh, want_dh, max(TOLERANCE[dtype], 2e-4), "dh")
    close(dw, want_dw, max(TOLERANCE[dtype], 2e-4), "dW")


@EAGER
def test_a_logit_of_minus_infinity_has_no_part(eager: bool) -> None:
    h = torch.tensor([[256.0]]).half()
    whole = torch.tensor([[-60000.0], [1 / 256], [2 / 256]]).half()  # the first product is beyond fp16
    g = torch.ones(1)
    output, dh, dw = gradients(h, whole, torch.tensor([2]), g, g_entropy=g, eager=eager)
    want, _, want_dw = oracle(h, whole[1:], torch.tensor([1]), g, g, 1.0)
    check_output(output, want)
    assert dw[0] == 0
    assert dh.isfinite().all()
    close(dw[1:], want_dw, TOLERANCE[torch.float16], "dW")


@EAGER
def test_an_ignored_token_hides_what_its_gradient_is(eager: bool) -> None:
    h, whole = head(2, 20, 4, torch.float32)
    _, dh, dw = gradients(h, whole, torch.tensor([3, IGNORE]), torch.tensor([1.0, torch.nan]), eager=eager)
    assert dh[0].isfinite().all()
    assert dw.isfinite().all()
    assert (dh[1] == 0).all()


@EAGER
def test_ignore_index_may_be_a_row(eager: bool) -> None:
    h, whole = head(3, 20, 4, torch.float32)
    output, dh, _ = gradients(h, whole, torch.tensor([0, 5, 0]), torch.ones(3), ignore_index=0, eager=eager)
    assert (output.logp == 0).tolist() == [True, False, True]
    assert (dh == 0).all(1).tolist() == [True, False, True]


@EAGER
def test_a_target_outside_the_vocabulary_is_nan(eager: bool) -> None:
    # 21 rows in chunks of 16: 21 and 31 lie in what the last chunk reads beyond them.
    wrong = [-1, 21, 31, 2**40, -(2**63), 2**63 - 1]
    h, whole = head(len(wrong) + 2, 21, 4, torch.float32)
    targets = torch.tensor([20, *wrong, 0])
    output, dh, dw = gradients(h, whole, targets, torch.ones(len(targets)), eager=eager)
    want = [False, *[True] * len(wrong), False]
    assert output.logp.isnan().tolist() == want
    assert dh.isnan().all(1).tolist() == want == dh.isnan().any(1).tolist()
    assert dw.isnan().all()
    assert output.lse.isfinite().all()
    assert output.entropy.isfinite().all()


def test_frozen_weight_and_frozen_input() -> None:
    h, whole = head(7, 20, 4, torch.float16)
    targets, g = targets_of(7, 20, 2), torch.randn(7)
    output, want_dh, want_dw = gradients(h, whole, targets, g)
    weight = PeerShards.of(split(whole, 2), shape=whole.shape)
    given = arguments(h, weight, targets, output=output, g_logp=g)
    dh = torch.full(h.shape, torch.nan)
    linear_cross_entropy_grad(**given, gradient=None, dh=dh)
    torch.testing.assert_close(dh, want_dh, rtol=0, atol=0)
    gradient = split(torch.zeros(whole.shape), 2)
    linear_cross_entropy_grad(**given, gradient=PeerShards.of(gradient, shape=whole.shape), dh=None)
    torch.testing.assert_close(join(gradient), want_dw, rtol=0, atol=0)
    linear_cross_entropy_grad(**given, gradient=None, dh=None)


# Llama-3-8B; Qwen2.5-1.5B and 32B.
@pytest.mark.parametrize("head_of", [(128256, 4096), (151936, 1536), (152064, 5120)], ids=str)
def test_default_chunks_keep_to_an_eighth_of_the_logits(head_of: tuple) -> None:
    vocabulary, columns = head_of
    for tokens, world, element_bytes, backward in itertools.product(
        (2048, 4096, 5000, 16384, 65536), (1, 2, 3, 4, 8), (2, 4), (False, True)
    ):
        sizes = {"tokens": tokens, "columns": columns, "element_bytes": element_bytes, "backward": backward}
        chunk = chunk_rows(vocabulary=vocabulary, world=world, **sizes)
        assert extra_bytes(chunk=chunk, **sizes) <= tokens * vocabulary * element_bytes / 8, (sizes, world)
        assert chunk in range(512, 4097, 64), (sizes, world)


def peak_extra_bytes(run: Callable[[], object]) -> int:
    """What `run` allocates at its peak over what there was, allocations inside of operators included."""
    if not place.INTERPRETED:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    return peak_bytes(run)


@EAGER
def test_peak_memory_of_a_run(eager: bool) -> None:
    """fp32 off the GPU: only on CUDA are products of 16-bit operands made without widening them, which would count."""
    tokens, dtype = (128, torch.float32) if place.INTERPRETED else (16384, torch.bfloat16)
    vocabulary, columns, world = 16384, 16, 2
    h, whole = torch.randn(tokens, columns).to(dtype), torch.randn(vocabulary, columns).to(dtype)
    targets, g = torch.randint(0, vocabulary, (tokens,)), torch.randn(tokens)
    weight = PeerShards.of(split(whole, world), shape=whole.shape)
    gradient = PeerShards.of(split(torch.zeros(whole.shape), world), shape=whole.shape)
    dh = torch.full(h.shape, torch.nan, dtype=dtype)
    tile = SoftmaxTile(t=64 if place.INTERPRETED else 4)  # the interpreter wants few programs

    def forward(count: int) -> HeadOutput:
        return linear_cross_entropy(h=h[:count], weight=weight, targets=targets[:count], tile=tile, eager=eager)

    def backward(count: int, output: HeadOutput) -> None:
        linear_cross_entropy_grad(
            h=h[:count],
            weight=weight,
            targets=targets[:count],
            output=output,
            g_logp=g[:count],
            gradient=gradient,
            dh=dh[:count],
            tile=tile,
            eager=eager,
        )

    backward(1, forward(1))  # libraries' workspaces, once per process
    output = forward(tokens)
    sizes = {"tokens": tokens, "columns": columns, "element_bytes": h.element_size(), "eager": eager}
    for run, is_backward in ((lambda: forward(tokens), False), (lambda: backward(tokens, output), True)):
        peak = peak_extra_bytes(run)
        assert peak <= tokens * vocabulary * h.element_size() / 8
        chunk = chunk_rows(vocabulary=vocabulary, world=world, backward=is_backward, **sizes)
        want = extra_bytes(chunk=chunk, backward=is_backward, **sizes)
        if place.INTERPRETED:
            want -= 2 * chunk * columns * h.element_size()  # peers' rows are read where they lie
        # Allocators round up; nothing else is allocated than what `extra_bytes` counts.
        assert peak == pytest.approx(want, rel=0.1)
