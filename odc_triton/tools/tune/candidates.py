"""Candidates: implementations of an operator that are worth measuring, and the choice among the measured ones."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from odc_kernels.tiles import LinearTile, ProductShape, WgradTile, chip_of, ranked, tile_of

from ...nn.choice import TABLE, Choice, as_choice, choose
from .workload import Workload

# Of the kernels whose tiles are searched, those that a choice runs.
_KERNELS = {"direct": ("linear", "linear_dx"), "staged": ("linear_staged", "linear_dx_staged")}
_BY_KERNELS = {
    "linear": [
        *("triton/gathered/fused", "triton/direct/whole", "triton/direct/fused"),
        *("triton/staged/whole", "triton/staged/fused"),
    ],
    "qkv": ["triton/gathered/whole", "triton/gathered/fused", "triton/direct/whole", "triton/direct/fused"],
    "embedding": ["triton/direct/fused", "triton/direct/whole"],
    "log_probs": ["triton/direct/fused"],
    "experts": ["triton/direct/fused", "triton/staged/fused"],
}
_BY_TORCH = {
    "linear": ["eager/gathered/whole", "eager/gathered/fused"],
    "qkv": ["eager/gathered/whole"],
    "embedding": ["eager/direct/fused", "eager/direct/whole"],
    "log_probs": ["eager/direct/fused"],
}

# A candidate must beat the shipped choice by this much in the median, and in this share of the rounds, each of which
# runs both. Less is noise, and the table would change with every measurement.
MARGIN = 0.03
ROUNDS_WON = 0.75

Rounds = Mapping[str, Sequence[float]]
"""Seconds of each candidate, by its words, round by round."""


def ways(
    workload: Workload, tokens: int, *, device: str, apart: bool, kernels: bool, shared: bool = False
) -> dict[str, Choice]:
    """Candidates by their words, the shipped one first.

    device: "cpu" or "cuda"; apart: shards are separate, so that weights can be read directly, or gathered;
    kernels: Triton's kernels run there; shared: a GPU has several ranks. Their rows are not fetched by a copy engine,
    so "staged" would wait for them before it starts, which makes it pointless.
    """
    first = shipped(workload, tokens, device=device)
    words = [*_BY_TORCH.get(workload.operator, ()), *(_BY_KERNELS[workload.operator] if kernels else [])]
    if apart and device == "cpu" and workload.operator == "linear":
        words += ["eager/direct/whole", "eager/direct/fused"]
    if device == "cuda" and workload.operator == "linear":
        words.remove("eager/gathered/fused")  # torch can't add to the owners while kernels do: it would run as "whole"
    if shared:
        words = [each for each in words if "staged" not in each]
    return {each: as_choice(each) for each in dict.fromkeys((first.words, *words))}


def shipped(workload: Workload, tokens: int, *, device: str) -> Choice:
    """The choice that runs without a measured table."""
    return choose(workload.operator, shape=workload.shape, tokens=tokens, device_type=device, table=TABLE)


def tiles(
    choice: Choice,
    workload: Workload,
    *,
    tokens: int,
    world: int,
    element_bytes: int,
    arch: int,
    most: int,
    device: str = "",
):
    """The tiles to try for each kernel that `choice` runs for `linear`: at most `most`, the predicted fastest first on
    the chip of that `device`, its name.

    Yields (kernel, name, choice with that tile). The kernel's own tile is not among them.
    """
    if workload.operator != "linear" or choice.backend != "triton":
        return
    chip = chip_of(device, arch)
    kernels = [*_KERNELS.get(choice.source, ()), *(["wgrad"] if choice.wgrad == "fused" else [])]
    problem = ProductShape(
        tokens=tokens, rows=workload.shape[0], columns=workload.shape[1], world=world, element_bytes=element_bytes
    )
    for kernel in kernels if chip is not None else ():
        own = tile_of(kernel, element_bytes=element_bytes, arch=arch, tokens=tokens)
        best = [tile for _, tile in ranked(kernel, problem, chip) if tile != own][:most]
        for tile in best:
            yield kernel, _name(kernel, tile), replace(choice, tiles=((kernel, tile),))


def _name(kernel: str, tile: LinearTile | WgradTile) -> str:
    return f"{kernel} {tile.t}x{tile.n}x{tile.k} {tile.num_warps} warps {tile.num_stages} stages"


def decide(seconds: Mapping[int, Rounds], shipped: Mapping[int, str], *, one_backend: bool = False) -> dict[int, str]:
    """For each number of tokens the fastest candidate; the shipped one if none is clearly faster.

    seconds: by tokens, of candidates with the right result. A shipped choice that is missing there (it did not
    run) loses. one_backend: kernels run it for every number of tokens or for none (see `qkv.is_fused`); the
    backend is then the one whose best candidates take the least time over all numbers of tokens.

    Raises ValueError for a number of tokens without any result.
    """
    for tokens, of in seconds.items():
        if not of:
            raise ValueError(f"no way to run it with {tokens} tokens gave a result")
    if one_backend:
        kept = _best_backend(seconds, next(iter(shipped.values())).split("/")[0])
        seconds = {
            tokens: {words: rounds for words, rounds in of.items() if words.split("/")[0] == kept}
            for tokens, of in seconds.items()
        }
    return {tokens: _fastest(of, shipped[tokens]) for tokens, of in seconds.items()}


def _fastest(of: Rounds, shipped: str) -> str:
    best = min(of, key=lambda words: statistics.median(of[words]))
    return best if shipped not in of or _is_clear(of[best], of[shipped]) else shipped


def _is_clear(new: Sequence[float], old: Sequence[float]) -> bool:
    won = sum(n < o for n, o in zip(new, old, strict=True)) / len(new)
    return won >= ROUNDS_WON and statistics.median(new) <= statistics.median(old) * (1 - MARGIN)


def _best_backend(seconds: Mapping[int, Rounds], shipped: str) -> str:
    everywhere = set.intersection(*({words.split("/")[0] for words in of} for of in seconds.values()))
    if not everywhere:
        raise ValueError("no backend gave a result for every number of tokens")
    total: dict[str, list[float]] = {}
    for backend in sorted(everywhere):
        best = [
            min((r for words, r in of.items() if words.split("/")[0] == backend), key=statistics.median)
            for of in seconds.values()
        ]
        total[backend] = [sum(rounds) for rounds in zip(*best, strict=True)]
    return _fastest(total, shipped)
