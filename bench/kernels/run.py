"""The kernels' benchmark: operators on the layers of real models, each checked against plain torch, then timed.

`python -m bench.suites.gpu` has it in sections: every operator on a tiny model, the most used at a model's sizes, all
sizes. In a round ours and every baseline run once, the L2 flushed before each. Peers are plain buffers on the one GPU,
so no link is in the figures. The roofline: the least time that a call could take, the longer of its arithmetic and its
memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..device import Gpu
from .problem import Model, Operator, Prepared, Problem, Run, Work

# In order of interest, because a run may end early.
TOKENS = (4096, 16, 128, 16384, 1, 1024, 65536)
WORLDS = (8, 1, 2, 4)
WARM_UP = 3  # calls

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


def quantiles(us: Sequence[float]) -> dict[str, float]:
    """p20, p50, p80, each the nearest of the values."""
    ordered = sorted(us)
    return {f"p{percent}": ordered[round((len(ordered) - 1) * percent / 100)] for percent in (20, 50, 80)}


def warm_up(runs: Mapping[str, Run], gpu: Gpu) -> tuple[dict[str, Run], dict[str, str]]:
    """Calls each function a few times. Returns those that run, and why the others don't: a baseline may need more
    memory, or a newer torch. Errors of "ours" are raised.
    """
    good, missing = {}, {}
    for name, run in runs.items():
        try:
            for _ in range(WARM_UP):
                run()
            gpu.synchronize()
            good[name] = run
        except (RuntimeError, TypeError) as error:
            if name == "ours":
                raise
            missing[name] = str(error).splitlines()[0]
    return good, missing


def interleaved(runs: Mapping[str, Run], gpu: Gpu, *, seconds: float) -> dict[str, list[float]]:
    """Microseconds of every call: each round calls every function once, for as many rounds as fit into about `seconds`.

    Every round begins with another function.
    """
    flush = torch.empty(gpu.flush_bytes, dtype=torch.int8, device=gpu.type)
    names = list(runs)
    us: dict[str, list[float]] = {name: [] for name in names}
    least, most = gpu.rounds
    rounds, done = least, 0
    while done < rounds:
        turn = done % len(names)
        marks = {}
        for name in names[turn:] + names[:turn]:
            flush.zero_()
            begin = gpu.mark()
            runs[name]()
            marks[name] = begin, gpu.mark()
        gpu.synchronize()
        for name, (begin, end) in marks.items():
            us[name].append(gpu.us_between(begin, end))
        done += 1
        if done == least:
            round_seconds = sum(map(sum, us.values())) / done / 1e6 + 5e-4 * len(names)
            rounds = min(max(int(seconds / round_seconds), least), most)
    return us


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this GPU reached in this run, so that the roofline includes its clocks and its heat."""

    flops: float
    hbm_bytes_s: float  # counting both reads and writes

    @classmethod
    def measured(cls, gpu: Gpu, *, dtype: torch.dtype, seconds: float = 0.5) -> Machine:
        """The rates of the library's product of two square matrices and of copies, on random numbers."""
        a, b = (torch.randn(gpu.side, gpu.side, device=gpu.type, dtype=dtype) for _ in range(2))
        source = torch.randint(-128, 127, (gpu.copy_bytes,), dtype=torch.int8, device=gpu.type)
        target, out = torch.empty_like(source), torch.empty_like(a)
        runs = {"product": lambda: torch.mm(a, b, out=out), "copy": lambda: target.copy_(source)}
        for run in runs.values():
            run()
        second = {name: quantiles(us)["p50"] / 1e6 for name, us in interleaved(runs, gpu, seconds=seconds).items()}
        return cls(flops=2 * gpu.side**3 / second["product"], hbm_bytes_s=2 * gpu.copy_bytes / second["copy"])

    def seconds(self, work: Work) -> float:
        """The roofline. The peers' memory is this GPU's, and their traffic is added to its own."""
        return max(work.flops / self.flops, (work.hbm_bytes + work.peer_bytes) / self.hbm_bytes_s)


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
