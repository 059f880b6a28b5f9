"""What the GPU reaches, and operators on it: their results against plain torch, and their times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels.operators import all_operators  # first: it decides where kernels run  # isort: skip

from odc_kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_grad
from odc_kernels.peers import PeerShards
from odc_triton.packs.document_attention import AttentionTerms, one_length, varlen
from odc_triton.sequence.attention import AttentionOfTree, SeenRows, parts_of
from odc_triton.sequence.flash import FlashAttentionOfTree

from ...device import Gpu
from ...kernels.problem import MODELS, TINY
from ...kernels.run import TOKENS, WORLDS, Machine, problems, ran

# At Llama-3-8B's sizes, the most used first.
TIMED = ("wgrad", "linear staged", "linear_dx staged", "scatter", "gather", "linear_cross_entropy_grad")
TIMED += ("linear_cross_entropy", "exact publish", "qkv", "qkv_grad", "linear_divergence", "embedding_grad")
TIMED += ("experts", "experts wgrad")
LAYERS = ("gate, up", "head", "embedding", "qkv")


def rates(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """What other numbers are relative to: torch's product of two square matrices, a copy; and a product into fp32."""
    found = Machine.measured(gpu, dtype=gpu.dtype)
    yield {"what": "machine", "tflops": found.flops / 1e12, "copy_gb_s": found.hbm_bytes_s / 1e9}
    if not gpu.rehearsal:
        a, b = torch.randn(64, 32, device=gpu.type).bfloat16(), torch.randn(32, 16, device=gpu.type).bfloat16()
        out = torch.ones(64, 16, device=gpu.type)
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        alike = torch.allclose(out, 1 + a.float() @ b.float(), rtol=1e-3, atol=1e-3)
        yield {"what": "addmm in fp32", "passed": alike}


def right(gpu: Gpu, *, most: float) -> Iterator[dict[str, Any]]:
    """Every operator once, on the odd sizes of a tiny model; shared-prefix trees against a mask, at `most` apart."""
    from tests.support.trees import CASES, GivenRows, dense, random_tree, tensors_of, with_gradients

    for operator in all_operators().values():
        yield ran(operator, problems(operator, [TINY], (33,), (2,), dtype=torch.bfloat16)[0], gpu)
    of_tree = AttentionOfTree if gpu.rehearsal else FlashAttentionOfTree
    for name, tree in {**CASES, **{f"random {seed}": random_tree(seed, longest=300) for seed in range(3)}}.items():
        given = tensors_of(tree, gpu.dtype, gpu.type, 128)
        want = with_gradients({key: x.float() for key, x in given.items()}, partial(dense, tree, None))

        def in_parts(*each: torch.Tensor, parts: Any = tree.parts) -> torch.Tensor:
            return of_tree.apply(*each[:3], parts, None, GivenRows(*each[3:]))

        found = with_gradients(given, in_parts)
        off = {key: float((found[key].float() - x).norm() / x.norm()) for key, x in want.items()}
        yield {"what": f"tree: {name}", "passed": all(each <= most for each in off.values()), "off": off}


def kernels(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Operators on layers of Llama-3-8B, 4,096 tokens, all eight owners on this GPU."""
    model, tokens, world = (TINY, 3, 2) if gpu.rehearsal else (MODELS["llama-3-8b"], 4096, 8)
    reached = Machine.measured(gpu, dtype=torch.bfloat16)
    for name in TIMED:
        of = problems(all_operators()[name], [model], (tokens,), (world,), dtype=torch.bfloat16)
        chosen = next((each for each in of if each.layer.name in LAYERS), of[0])
        yield ran(all_operators()[name], chosen, gpu, reached)


def sweep(gpu: Gpu, *, operator: str) -> Iterator[dict[str, Any]]:
    """One operator at all sizes."""
    models, tokens, worlds = ([TINY], (3,), (2,)) if gpu.rehearsal else (list(MODELS.values()), TOKENS, WORLDS)
    reached, of = Machine.measured(gpu, dtype=torch.bfloat16), all_operators()[operator]
    for problem in problems(of, models, tokens, worlds, dtype=torch.bfloat16):
        yield ran(of, problem, gpu, reached)


def head(gpu: Gpu, *, share: float) -> Iterator[dict[str, Any]]:
    """Loss and gradients over a vocabulary: in chunks, and by full logits, of whose memory `share` is allowed."""
    sizes = ((8192, 151936, 1536), (8192, 128256, 4096), (32768, 151936, 1536))
    for tokens, rows, columns in ((64, 256, 32),) if gpu.rehearsal else sizes:
        gpu.forget()
        ways = _heads(gpu, tokens, rows, columns)
        found = {name: _timed(gpu, run) for name, run in ways.items()}
        fused, full = found["fused"], found["full logits"]
        fits = fused is not None and (full is None or gpu.rehearsal or fused["extra_gb"] < share * full["extra_gb"])
        yield {"what": f"{tokens} x {rows} x {columns}", "passed": fits, **found}
        del ways


def _heads(gpu: Gpu, tokens: int, rows: int, columns: int) -> dict[str, Callable[[], Any]]:
    made = {"device": gpu.type, "dtype": gpu.dtype}
    h, w = torch.randn(tokens, columns, **made), torch.randn(rows, columns, **made) * columns**-0.5
    y, g = torch.randint(rows, (tokens,), device=gpu.type), torch.full((tokens,), -1.0 / tokens, device=gpu.type)
    sums, dh = torch.zeros(rows, columns, device=gpu.type), torch.empty_like(h)
    weight = PeerShards.of([w], shape=w.shape, aligned=not gpu.rehearsal)
    into = PeerShards.of([sums], shape=w.shape, aligned=not gpu.rehearsal)
    sink = (lambda _, at, more: sums[at : at + len(more)].add_(more)) if gpu.rehearsal else into

    def fused() -> None:
        out = linear_cross_entropy(h=h, weight=weight, targets=y)
        linear_cross_entropy_grad(h=h, weight=weight, targets=y, output=out, g_logp=g, gradient=sink, dh=dh)

    def full() -> None:
        leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
        torch.autograd.grad(F.cross_entropy((leaves[0] @ leaves[1].t()).float(), y), leaves)

    return {"fused": fused, "full logits": full}


def _timed(gpu: Gpu, run: Callable[[], Any]) -> dict[str, float] | None:
    """None if it has not enough memory."""
    try:
        run()
        marks = [gpu.mark()]
        for _ in range(5):
            run()
            marks.append(gpu.mark())
        gpu.synchronize()
        us = [gpu.us_between(*each) for each in pairwise(marks)]
        return {"ms": statistics.median(us) / 1e3, "extra_gb": gpu.peak_bytes(run) / 1e9}
    except torch.OutOfMemoryError:
        gpu.free_cached()
        return None


def attention(gpu: Gpu, *, most: float) -> Iterator[dict[str, Any]]:
    """The last segment of a long sample in parts and by one call over all keys: less than `most` apart."""
    for own, before in ((8, 24),) if gpu.rehearsal else ((8192, 57344), (16384, 16384)):
        ways = _attentions(gpu, own, before)
        pairs = zip(("out", "dq", "dk", "dv"), *(run() for run in ways.values()), strict=True)
        off = {name: float((one.float() - other).norm() / other.norm()) for name, one, other in pairs}
        times = {name: _timed(gpu, run) for name, run in ways.items()}
        yield {
            "what": f"segment of {own} after {before}",
            "off": off,
            "passed": all(each < most for each in off.values()),
            **times,
        }
        del ways


def _attentions(gpu: Gpu, own: int, before: int) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Forward and backward: the result and the gradients of queries, keys, values, [1, heads, tokens, width]."""
    from tests.support.trees import GivenRows

    made = {"device": gpu.type, "dtype": gpu.dtype}
    q, seed = (torch.randn(1, own, 32, 128, **made).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(1, before + own, 8, 128, **made).transpose(1, 2) for _ in range(2))
    parts = parts_of([0, own], [[SeenRows(1, 0, before)]])
    ends = [torch.tensor([0, count], dtype=torch.int32, device=gpu.type) for count in (own, before + own)]
    of_tree = AttentionOfTree if gpu.rehearsal else FlashAttentionOfTree

    def in_parts() -> list[torch.Tensor]:
        mine = [each[:, :, -own:].detach().requires_grad_() for each in (q, k, v)]
        theirs = [each[:, :, :before].detach().requires_grad_() for each in (k, v)]
        out = of_tree.apply(*mine, parts, None, GivenRows(*theirs))
        out.backward(seed)
        joined = [torch.cat((first.grad, last.grad), 2) for first, last in zip(theirs, mine[1:], strict=True)]
        return [out.detach(), mine[0].grad, *joined]

    def at_once() -> list[torch.Tensor]:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        if gpu.rehearsal:
            out = one_length(*leaves, AttentionTerms())
        else:
            by_token = [each[0].transpose(0, 1) for each in leaves]
            how = {"ends_of_keys": ends[1], "longest_keys": before + own}
            out = varlen(*by_token, ends[0], own, AttentionTerms(), **how).transpose(0, 1)[None]
        return [out.detach(), *torch.autograd.grad(out, leaves, seed)]

    return {"in_parts": in_parts, "at_once": at_once}
