"""What `odc-triton bench` found, as rows and as plain data. Pure: the bootstrap draws from a fixed seed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from odc_triton.jobs.reports.report import table

from .. import quiet
from ..harness import bootstrap_ratio
from ..variants import Odc, OdcSplit
from .alone import Turn

_OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory|MemoryError", re.IGNORECASE)
_KILLED = re.compile(r"SIGKILL|Signal 9\b")
# Tolerances of first losses, before any step: same weights and samples, summed in another order and in 16 bits.
ALIKE = {"fp32": 1e-3, "bf16": 2e-2}
COLUMNS = (
    *("", "tokens/s per rank", "MFU", "peak GB per rank", "idle", "speed, fastest baseline = 1", "95% interval"),
    "",
)


@dataclass(kw_only=True)
class Result:
    """One variant. `turns`: its rounds so far, in order. `failure`: why there are no more."""

    name: str
    is_baseline: bool
    turns: list[Turn] = field(default_factory=list)
    failure: str | None = None

    @property
    def seconds(self) -> list[float]:
        return [second for turn in self.turns for second in turn.seconds]

    @property
    def ran_out_of_memory(self) -> bool:
        return self.failure is not None and bool(_OUT_OF_MEMORY.search(self.failure) or _KILLED.search(self.failure))

    @property
    def remark(self) -> str:
        """Why it ended early, in a few words."""
        if self.failure is None:
            return ""
        when = f"in round {len(self.turns) + 1}"
        if _OUT_OF_MEMORY.search(self.failure):
            return f"out of memory {when}"
        if _KILLED.search(self.failure):
            return f"a rank was killed {when}: out of memory, most likely"
        text = " ".join(self.failure.split())
        return f"failed {when}: {text if len(text) <= 160 else text[:157] + '...'}"


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What every variant had to do, by timed minibatch, round after round. `peak`: FLOP/s of a rank, if known."""

    tokens: Sequence[int]
    flops: Sequence[float]
    ranks: int
    peak: float | None = None


def fastest_baseline(results: Sequence[Result]) -> Result | None:
    """The fastest baseline among those that finished every round; None if there is none."""
    fit = [result for result in results if result.is_baseline and result.turns and result.failure is None]
    return min(fit, key=lambda result: sum(result.seconds) / len(result.seconds), default=None)


def figures(result: Result, fastest: Result | None, amounts: Amounts) -> dict[str, Any]:
    """A variant's numbers, None if unknown. Ratios are over the minibatches that both have."""
    seconds = result.seconds
    if not seconds:
        return dict.fromkeys(("tokens_per_s_per_rank", "mfu", "peak_gb", "idle", "speed"))
    took, count = sum(seconds), len(seconds)
    idle = [turn.idle for turn in result.turns if turn.idle is not None]
    return {
        "tokens_per_s_per_rank": sum(amounts.tokens[:count]) / took / amounts.ranks,
        "mfu": utilisation(sum(amounts.flops[:count]), took, amounts.ranks, amounts.peak),
        "peak_gb": max(max(turn.peak_bytes) for turn in result.turns) / 1e9,
        "idle": sum(idle) / len(idle) if idle else None,
        "speed": _ratio(fastest.seconds, seconds) if fastest is not None else None,
    }


def row_of(result: Result, fastest: Result | None, amounts: Amounts) -> list[str]:
    found = figures(result, fastest, amounts)

    def shown(name: str, form: str) -> str:
        return "-" if found[name] is None else format(found[name], form)

    speed = found["speed"]
    return [
        result.name + (" (fastest baseline)" if result is fastest else ""),
        shown("tokens_per_s_per_rank", ",.0f"),
        shown("mfu", ".1%"),
        shown("peak_gb", ".2f"),
        shown("idle", ".1%"),
        "-" if speed is None else f"{speed['ratio']:.2f}",
        "-" if speed is None or result is fastest else f"{speed['low']:.2f} to {speed['high']:.2f}",
        result.remark,
    ]


def text_of(results: Sequence[Result], amounts: Amounts) -> str:
    fastest = fastest_baseline(results)
    shown = table([row_of(result, fastest, amounts) for result in results], COLUMNS)
    gained = [
        f"- {each['fast']} is {each['ratio']:.2f} ({each['low']:.2f} to {each['high']:.2f}) times as fast as "
        f"{each['slow']}: {each['cause']}"
        for each in gains(results)
    ]
    return "\n".join([shown, "", *gained] if gained else [shown])


def _ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Over the minibatches that both have."""
    count = min(len(slow), len(fast))
    return bootstrap_ratio(slow[:count], fast[:count])


def gains(results: Sequence[Result]) -> list[dict[str, Any]]:
    """What ODC gains over the fastest baseline, cause by cause, of the variants that finished every round."""
    ended = {result.name: result.seconds for result in results if result.turns and result.failure is None}
    fastest = getattr(fastest_baseline(results), "name", None)
    causes = (
        (fastest, Odc.name, "no waiting in layers, and transfers by memory that ranks share"),
        (Odc.name, OdcSplit.name, "long sequences are split over ranks"),
        (fastest, OdcSplit.name, "both together"),
    )
    return [
        {"fast": fast, "slow": slow, "cause": cause, **_ratio(ended[slow], ended[fast])}
        for slow, fast, cause in causes
        if {slow, fast} <= ended.keys()
    ]


def progress(results: Sequence[Result], rounds: int, turn: str, took_s: float) -> str:
    """`turn` with its number and the time left; after the first round also whether the machine was not quiet."""
    done = sum(len(result.turns) + (result.failure is not None) for result in results)
    left = sum(rounds - len(result.turns) for result in results if result.failure is None)
    round_ = max(len(result.turns) + (result.failure is not None) for result in results)
    text = f"  [round {round_} of {rounds}, turn {done} of {done + left}] {turn}"
    if left:
        text += f"; about {timedelta(seconds=round(took_s / done * left))} left"
    if left and done == len(results) and disturbed(results)["left"]:
        text += f"\nAfter the first round: {quiet_or_not(results)} Until then take the ratios as rough ones."
    return text


def disturbed(results: Sequence[Result]) -> dict[str, int | None]:
    """Of the timed minibatches of all turns; none is measured again."""
    turns = [turn for result in results for turn in result.turns]
    return quiet.disturbed([each] for turn in turns for each in zip(turn.seconds, turn.waited_s, strict=True))


def quiet_or_not(results: Sequence[Result]) -> str:
    """Whether the machine was quiet, in a sentence."""
    return quiet.in_words(disturbed(results), sum(len(result.seconds) for result in results))


def as_data(results: Sequence[Result], amounts: Amounts, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    fastest = fastest_baseline(results)
    variants = {}
    for result in results:
        failure = None
        if result.failure is not None:
            failure = {"out_of_memory": result.ran_out_of_memory, "text": result.failure}
        turns = [asdict(turn) for turn in result.turns]
        variants[result.name] = {**figures(result, fastest, amounts), "turns": turns, "failure": failure}
    return {
        **about,
        "fastest_baseline": None if fastest is None else fastest.name,
        "gains": gains(results),
        "loss_spread": loss_spread(results),
        "disturbed": disturbed(results),
        "tokens": list(amounts.tokens),
        "flops": list(amounts.flops),
        "peak_flops": amounts.peak,
        "variants": variants,
    }


def loss_spread(results: Sequence[Result]) -> float:
    """The largest difference in any round of the variants' losses on its first minibatch, relative to the smallest."""
    rounds: dict[int, list[float]] = {}
    for result in results:
        for number, turn in enumerate(result.turns):
            rounds.setdefault(number, []).append(turn.first_loss)
    return max(((max(losses) - min(losses)) / min(losses) for losses in rounds.values()), default=0.0)


# TFLOP/s from NVIDIA's data sheets: dense bf16 products, sums in fp32. The first pattern that matches the driver's name
# for the GPU applies; a GPU not listed is unknown.
_BF16_TFLOPS = (
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.5),
    (r"\bH200\b", 989.4),
    (r"\bGH200\b", 989.4),
    (r"\bH100 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.5),
    (r"\bH100\b", 989.4),
    (r"\bA100\b", 312.0),
    (r"\bA800\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bRTX 4090\b", 165.2),
    (r"\bRTX 3090\b", 71.0),
)


def peak_flops(name: str | None, dtype: str) -> float | None:
    """FLOP/s in "bf16" of a GPU with that name (as the driver gives it); None if unknown, and for other dtypes.

    fp32 has none: its peak depends on whether products run in TF32. Nor has a part of a GPU (MIG).
    """
    if name is None or dtype != "bf16" or "MIG" in name:
        return None
    return next((tflops * 1e12 for pattern, tflops in _BF16_TFLOPS if re.search(pattern, name)), None)


def utilisation(flops: float, seconds: float, ranks: int, peak: float | None) -> float | None:
    """MFU: `flops` in `seconds` as a share of all ranks' peak; None if the peak is unknown."""
    return None if peak is None else flops / (seconds * ranks * peak)
