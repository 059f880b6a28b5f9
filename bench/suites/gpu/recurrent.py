"""Recurrent layers' functions by the packages that are installed, against transformers' torch on each sample alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from odc_triton.plan.entries import Segment
from odc_triton.recurrent.documents import documents_of
from odc_triton.recurrent.packages import Documents, Function, convolve, kernel_of
from odc_triton.recurrent.rules import DeltaRule, Rule, Scan
from odc_triton.recurrent.run import run_documents

from ...device import Gpu

# Two documents, and a sample off which others branch, one of them off a branch: these begin with a state.
PIECES = (None, Segment(0, 0, 200), Segment(1, 64, 134, 0), Segment(2, 129, 130, 0), Segment(3, 100, 120, 1), None)
LENGTHS = (70, 200, 70, 1, 20, 500)
BOUNDS = [0, *accumulate(LENGTHS)]
DELTA, KDA, SCAN, CONVOLUTION = "gated delta rule", "Kimi delta attention", "Mamba-2", "convolution"
FUNCTIONS = {
    DELTA: ("qwen3_5", "torch_chunk_gated_delta_rule", "flash-linear-attention"),
    KDA: ("kimi_linear", "chunk_kimi_delta_attention", "flash-linear-attention"),
    SCAN: ("nemotron_h", "mamba2_chunk_scan", "mamba-ssm"),
    CONVOLUTION: ("qwen3_5", "causal_conv1d_fn", "causal-conv1d"),
}


def recurrent(gpu: Gpu, *, most: float) -> Iterator[dict[str, Any]]:
    """Results, and gradients through the states with which branches begin: `most` apart, by norm."""
    for name, (family, called, package) in FUNCTIONS.items():
        function = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), called)
        kernel = kernel_of(function)
        if kernel is None and not gpu.rehearsal:
            yield {"what": name, "skipped": f"{package} is not installed"}
            continue
        plain, low = Function(kernel.torch if kernel else function, None), torch.bfloat16 if kernel else torch.float32
        # Decays are in fp32 in models too.
        given = {key: x if key in ("g", "a") else x.to(low) for key, x in _inputs(name, gpu).items()}
        found = _with_gradients(partial(_packed, name, Function(function, kernel)), [*given.values()])
        want = _with_gradients(partial(_alone, name, plain), [each.float() for each in given.values()])
        pairs = zip(("out", *given), found, want, strict=True)
        off = {key: float((one.float() - other).norm() / other.norm()) for key, one, other in pairs}
        by = kernel.package if kernel else "torch"
        yield {"what": name, "by": by, "passed": all(each <= most for each in off.values()), "off": off}


def _inputs(name: str, gpu: Gpu) -> dict[str, Tensor]:
    heads, width = (2, 16) if gpu.rehearsal else (16, 128)
    draw = partial(torch.randn, device=gpu.type)
    steps, rows, channels = (1, BOUNDS[-1], heads), (1, BOUNDS[-1], heads, width), heads * width
    if name == CONVOLUTION:
        return {"x": draw(1, BOUNDS[-1], channels), "weight": draw(channels, 4), "bias": draw(channels)}
    if name == SCAN:  # of two groups of heads
        made = {"x": draw(rows), "dt": draw(steps) - 4, "b": draw(1, BOUNDS[-1], 2, width)}
        return made | {"c": draw(1, BOUNDS[-1], 2, width), "a": -1 - draw(heads).abs()}
    decays = -0.02 * draw(rows if name == KDA else steps).abs()
    return {"q": draw(rows), "k": draw(rows), "v": draw(rows), "g": decays, "beta": draw(steps).sigmoid()}


def _with_gradients(run: Callable[[Sequence[Tensor]], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = run(leaves)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def _rule(name: str, function: Function, rows: Sequence[Tensor]) -> Rule:
    if name == SCAN:
        return Scan(function, rows[:4], rows[4], 64, {"dt_softplus": True})
    return DeltaRule(function, rows, {"use_qk_l2norm_in_kernel": True})


def _packed(name: str, function: Function, rows: Sequence[Tensor]) -> Tensor:
    if name != CONVOLUTION:
        return run_documents(_rule(name, function, rows), documents_of(BOUNDS, PIECES), None, [])
    if function.kernel is None:
        return _alone(name, function, rows)
    x, weight, bias = rows
    terms = {"weight": weight, "bias": bias, "activation": "silu"}
    return convolve(function.kernel, x.transpose(1, 2), Documents.of(LENGTHS, x.device), **terms).transpose(1, 2)


def _alone(name: str, function: Function, rows: Sequence[Tensor]) -> Tensor:
    found: list[Tensor] = []
    samples: dict[int, list[int]] = {}
    for segment, (first, end) in zip(PIECES, pairwise(BOUNDS), strict=True):
        at = [*range(first, end)]
        if name == CONVOLUTION:
            out = function.on(rows[0].device)(rows[0][:, at].transpose(1, 2), *rows[1:], "silu").transpose(1, 2)
        else:
            if segment is not None:
                at = samples[segment.sample] = [
                    *([] if segment.parent is None else samples[segment.parent][: segment.start]),
                    *at,
                ]
            own = [each if each.ndim == 1 else each[:, at] for each in rows]
            out, _ = _rule(name, function, own).run(0, len(at), None)
        found.append(out[:, first - end :])
    return torch.cat(found, dim=1)
