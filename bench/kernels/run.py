"""The kernels' benchmark: operators on the layers of real models, each checked against plain torch, then timed.

`python -m bench.suites.gpu` has it in sections: every operator on a tiny model, the most used at a model's sizes, all
sizes. In a round ours and every baseline run once, the L2 flushed before each. Peers are plain buffers on the one GPU,
so no link is in the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..device import Gpu
from .problem import Model, Operator, Prepared, Problem
from .timing import Machine, interleaved, quantiles, warm_up

# In order of interest, because a run may end early.
TOKENS = (4096, 16, 128, 16384, 1, 1024, 65536)
WORLDS = (8, 1, 2, 4)

# Relative to a result's largest number. 16 bits: one rounding, at the end (the interpreter truncates where a GPU
# rounds) or of the terms. fp32: up to 65,536 terms in another order, added by matrix units that keep a few bits less.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 2**-6}


def problems(
    operator: Operator, models: Sequence[Model], tokens: Sequence[int], worlds: Sequence[int], *, dtype: torch.dtype
) -> list[Problem]:
    """All of an operator, in the order that is given."""
    return [
        Problem(model=model, layer=layer, tokens=count, world=world, dtype=dtype)
        for world in worlds
        for count in (tokens if operator.has_tokens else (0,))
        for model in models
        for layer in operator.layers(model)
        if count <= operator.most_tokens
    ]


def name_of(operator: Operator, problem: Problem) -> str:
    layer, tokens = problem.layer, f", {problem.tokens} tokens" if problem.tokens else ""
    shape = f"{problem.model.name} {layer.name} [{layer.rows}, {layer.columns}]"
    return f"{operator.name}, {shape}{tokens}, world {problem.world}"


def check(prepared: Prepared) -> dict[str, Any]:
    """Runs it once against its reference. `errors`: each result's largest difference over the reference's largest
    number, None if it was not written. `fault`: what is wrong.
    """
    largest: dict[str, float] = {}
    differs: dict[str, float] = {}
    errors: dict[str, float] = {}
    limits: dict[str, float] = {}
    for name, got, want in prepared.check():
        if got.shape != want.shape:
            raise ValueError(f"{name} has shape {tuple(got.shape)}, its reference {tuple(want.shape)}")
        limits[name] = TOLERANCE[got.dtype]
        if got.numel():
            difference = (got.double() - want.double()).abs().max().item()
            largest[name] = max(largest.get(name, 0.0), want.double().abs().max().item())
            # A NaN, from a poisoned element that was not written, must not lose to a number.
            differs[name] = max(differs.get(name, 0.0), difference) if difference == difference else float("inf")
            errors[name] = differs[name] / (largest[name] or 1.0)
    wrong = {name: error for name, error in errors.items() if error > limits[name]}
    fault = ", ".join(f"{name} is off by {error:.2e}, allowed {limits[name]:.1e}" for name, error in wrong.items())
    finite = {name: error if math.isfinite(error) else None for name, error in errors.items()}  # JSON has no infinity
    return {"passed": not wrong, "fault": fault, "errors": finite}


def measure(prepared: Prepared, machine: Machine, gpu: Gpu, *, seconds: float) -> dict[str, Any]:
    """Times it and its baselines. `us`, and `ratios`, a baseline's time over ours in the same round: quantiles;
    `missing`: why a baseline was not timed.
    """
    runs, missing = warm_up({"ours": prepared.run, **prepared.baselines}, gpu)
    us = interleaved(runs, gpu, seconds=seconds)
    pairs = {name: zip(us["ours"], us[name], strict=True) for name in us if name != "ours"}
    found = {name: quantiles(values) for name, values in us.items()}
    second, work = found["ours"]["p50"] / 1e6, prepared.work
    return {
        "us": found,
        "ratios": {name: quantiles([b / a for a, b in of]) for name, of in pairs.items()},
        "missing": missing,
        "rounds": len(us["ours"]),
        "tflops": work.flops / second / 1e12,
        "hbm_gb_s": (work.hbm_bytes + work.peer_bytes) / second / 1e9,
        "of_roofline": machine.seconds(work) / second,
        "peak_bytes": gpu.peak_bytes(prepared.run),
    }


def ran(operator: Operator, problem: Problem, gpu: Gpu, machine: Machine | None = None) -> dict[str, Any]:
    """What was found of a problem: its check and, on a `machine`, if that passed, its times."""
    found: dict[str, Any] = {"what": name_of(operator, problem)}
    prepared = None
    try:
        prepared = operator.prepare(problem)
        found |= check(prepared)
        if machine is not None and found["passed"]:
            found |= measure(prepared, machine, gpu, seconds=0.3)
    except torch.OutOfMemoryError as error:
        found["skipped"] = str(error).splitlines()[0]
    except Exception as error:  # what a kernel or the compiler raises is its result
        found |= {"passed": False, "fault": f"{type(error).__name__}: {error}"[:600]}
    del prepared
    return found
