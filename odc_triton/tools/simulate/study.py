"""All settings over the same minibatches, ranked, and the table and verdict that `odc-triton simulate` prints.

Sequence lengths are read from a file, or drawn from a distribution that models a published data set.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np

from ...jobs.data.lengths import LEAST, read_lengths
from ...jobs.data.records import Record, message_text
from ...plan.order import in_families
from ...plan.queue import QUEUE
from ...plan.relatives import Relatives
from ...plan.split import readable_tokens
from .hardware import GpuKind, Links
from .job import SHARED, SPLIT, Job, assign_packs
from .lanes import Outcome
from .models import Model
from .run import simulate, simulate_runs

SETTINGS = {
    "FSDP2 + LocalSort": ("fsdp", "local"),
    "FSDP2 + LB-Micro": ("fsdp", "micro"),
    "FSDP2 + global packing": ("fsdp", "global"),
    "FSDP2 no reshard + LB-Mini": ("fsdp-no-reshard", "mini"),
    "ODC + LB-Micro": ("odc", "micro"),
    "ODC + LB-Mini": ("odc", "mini"),
    "ODC + queue": ("odc", "queue"),
}
BASELINE = "FSDP2 + LB-Micro"  # the paper's
COLUMNS = ("samples/GPU", "place", "setting", "s/step", "speed-up", "idle", "exposed comm.", "GB/GPU", "")
DRAWN = (BASELINE, "FSDP2 + global packing", "ODC + LB-Mini", "ODC + queue")  # in images
ALONE = "ODC, a run per GPU"
_COMMANDS = {
    "ODC + LB-Micro": "train sft --balance micro",
    "ODC + LB-Mini": "train sft --balance mini",
    "ODC + queue": "train sft --balance queue",
    "ODC + LB-Split": "train sft --split-sequences",
    "ODC + shared prefixes": "train sft --share-prefixes",
    ALONE: "sweep",
}
_ALIKE = 0.02  # a smaller gain or loss is none
_LINK_EFFICIENCY = 0.8  # of the nominal bandwidth
_COLLECTIVE_SMS = 0.1  # share of an A100's or H100's SMs: a dozen NCCL blocks, each on an SM


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting at one minibatch size.

    samples: per GPU in a minibatch.
    name: of the setting.
    outcome: of all trials.
    speedup: over the baseline, at the same size.
    fits: into a GPU's memory.
    """

    samples: int
    name: str
    outcome: Outcome
    speedup: float
    fits: bool


def make_job(
    model: Model,
    kind: GpuKind,
    links: Links,
    *,
    efficiency: float = 0.5,
    checkpointing: bool = True,
    fused_head: bool = True,
    slow: Mapping[int, float] | None = None,
) -> Job:
    """A job whose compute times are the model's FLOPs over `efficiency` of the GPU's peak."""
    seconds_per_flop, share = 1 / (kind.tflops * 1e12 * efficiency), 1 / 2 if model.is_frozen else 1 / 3
    again, cost = 1 if checkpointing else 0, model.cost  # attention has no weights
    worked = replace(cost, linear=cost.linear * (1 + again * share), quadratic=cost.quadratic * (1 + again / 3))
    return Job(
        links=links,
        seconds=lambda lengths: worked.pack(lengths) * seconds_per_flop,
        cost=cost,
        layers=model.layers,
        model=model,
        checkpointing=checkpointing,
        fused_head=fused_head,
        forward_share=share / (1 + again * share),
        barrier_s=1e-3,
        memory_gbs=kind.memory_gbs,
        slow=slow or {},
    )


def usual_links(kind: GpuKind, gpus: int, *, nodes: int = 1, nic_gbs: float | None = None) -> Links:
    """`nodes` nodes, each with `gpus` of a kind on a switch. `nic_gbs`: as reached; by default usual for the kind."""
    return Links(
        gpus=gpus,
        gbs=kind.link_gbs * _LINK_EFFICIENCY,
        nodes=nodes,
        nic_gbs=nic_gbs or kind.nic_gbs * _LINK_EFFICIENCY,
        sm_share=_COLLECTIVE_SMS,
    )


def rank_settings(
    lengths: Sequence[int],
    sizes: Sequence[int],
    *,
    job: Job,
    token_cap: int,
    memory_gb: float = math.inf,
    trials: int = 16,
    seed: int = 0,
    timeline_of: int | None = None,
    split: bool = False,
    relatives: Relatives | None = None,
    runs: int = 0,
) -> list[Row]:
    """All `SETTINGS` at each minibatch size, the fastest that fit first. Every setting gets the same minibatches.

    lengths: tokens of the samples from which minibatches are drawn.
    sizes: of minibatches, in samples per rank.
    job: machine and model.
    token_cap: the most tokens of a microbatch.
    memory_gb: of one GPU.
    trials: minibatches for each setting.
    seed: of the draw.
    timeline_of: the size at which outcomes keep their events.
    split: also "ODC + LB-Split".
    relatives: also "ODC + shared prefixes"; minibatches are then drawn as `MinibatchSampler` keeps samples together.
    runs: also so many runs over one base, which share the trials.

    Raises ValueError as `draw` and `assign`.
    """
    rows: list[Row] = []
    alone = replace(job, alone=True)
    settings = SETTINGS | ({"ODC + LB-Split": ("odc", SPLIT)} if split else {})
    longest = 0  # of the prefixes, which ranks of a node may read from each other
    if relatives is not None:
        settings = settings | {"ODC + shared prefixes": ("odc", SHARED)}
        if job.ranks > job.replicas:
            longest = max(each.start for each in relatives.strips(relatives.order))
    for samples in sizes:
        drawn = _draw(len(lengths), samples * job.ranks, trials, seed, relatives)
        minibatches = [[lengths[at] for at in numbers] for numbers in drawn]
        among = [None if relatives is None else relatives.among(numbers) for numbers in drawn]
        how = {"ranks": job.ranks, "replicas": job.replicas, "token_cap": token_cap, "cost": job.cost}
        tokens = readable_tokens(lengths, samples=samples * job.ranks, **how)
        read = defaultdict(int, {SPLIT: tokens, SHARED: longest})
        assigned = {
            balance: [
                assign_packs(m, balance=balance, split_tokens=read[balance], relatives=related, **how)
                for m, related in zip(minibatches, among, strict=True)
            ]
            for balance in dict.fromkeys(balance for _, balance in settings.values() if balance != QUEUE)
        }
        outcomes = {
            name: simulate(
                minibatches,
                job=job,
                schedule=schedule,
                balance=balance,
                token_cap=token_cap,
                timeline=samples == timeline_of,
                assigned=assigned.get(balance),
                split_tokens=read[balance],
            )
            for name, (schedule, balance) in settings.items()
        }
        if runs:
            outcomes[ALONE] = simulate_runs([minibatches[n::runs] for n in range(runs)], job=alone, token_cap=token_cap)
        base_s = outcomes[BASELINE].step_s
        found = [
            Row(
                samples=samples,
                name=name,
                outcome=outcome,
                speedup=base_s / outcome.step_s,
                fits=_least_bytes(outcome, alone if name == ALONE else job) <= memory_gb * 1e9,
            )
            for name, outcome in outcomes.items()
        ]
        rows += sorted(found, key=lambda row: (not row.fits, row.outcome.step_s))
    return rows


def _least_bytes(outcome: Outcome, job: Job) -> int:
    """Per GPU. Without activations if a token's are unknown; 0 without a model."""
    if outcome.peak_bytes is not None or job.model is None:
        return outcome.peak_bytes or 0
    return job.plans[outcome.schedule].total_bytes


def cells(rows: Sequence[Row]) -> list[list[object]]:
    """The rows for `report.table` under `COLUMNS`."""
    place: dict[int, int] = {}
    table = []
    for row in rows:
        place[row.samples] = place.get(row.samples, 0) + 1
        peak = row.outcome.peak_bytes
        table.append(
            [
                row.samples,
                place[row.samples],
                row.name,
                f"{row.outcome.step_s:.3g}",
                f"{row.speedup:.2f}x",
                f"{row.outcome.idle_share:.0%}",
                f"{row.outcome.exposed_share:.1%}",
                None if peak is None else f"{peak / 1e9:.0f}",
                "" if row.fits else "does not fit",
            ]
        )
    return table


def _fastest(rows: Sequence[Row]) -> Iterator[tuple[int, Row | None, Row | None]]:
    """Per minibatch size, in samples per GPU: the fastest ODC and the fastest FSDP2 setting that fit."""
    for samples in dict.fromkeys(row.samples for row in rows):
        fitting = [row for row in rows if row.samples == samples and row.fits]
        odc = next((row for row in fitting if row.outcome.schedule == "odc"), None)
        yield samples, odc, next((row for row in fitting if row.outcome.schedule != "odc"), None)


def verdict(rows: Sequence[Row]) -> str:
    """Per minibatch size: the fastest ODC setting against the fastest FSDP2 setting that fits."""
    lines = []
    for samples, odc, fsdp in _fastest(rows):
        head = f"{samples} samples per GPU: "
        if odc is None:
            lines.append(head + "ODC does not fit; lower --token-cap, or take more GPUs")
        elif fsdp is None:
            lines.append(head + f"{odc.name} fits, but no FSDP2 setting does")
        elif (ratio := fsdp.outcome.step_s / odc.outcome.step_s) <= 1 - _ALIKE:
            lines.append(head + f"{fsdp.name} is {1 / ratio:.2f}x as fast as the fastest ODC, {odc.name}")
        else:
            word = f"{ratio:.2f}x as fast as" if ratio >= 1 + _ALIKE else "as fast as"
            lines.append(head + f"{odc.name} is {word} the fastest FSDP2 that fits, {fsdp.name}")
    return "\n".join(lines)


def advice(rows: Sequence[Row]) -> str:
    """What to do: the options of the setting that gains most over FSDP2, if one gains."""
    found = [
        (fsdp.outcome.step_s / odc.outcome.step_s if fsdp is not None else math.inf, odc)
        for _, odc, fsdp in _fastest(rows)
        if odc is not None
    ]
    gain, best = max(found, key=lambda each: each[0], default=(0.0, None))
    if best is None or gain < 1 + _ALIKE:
        return "Next: FSDP2 is no slower here: stay with it, or try more samples per GPU, or --split-sequences"
    how = f"odc-triton {_COMMANDS[best.name]}"
    if best.name != ALONE:
        how += f" --samples-per-rank {best.samples}"
    return f"Next: train by {best.name} with `{how}`; measure it on your GPUs with `odc-triton bench`"


_OVER = 0.01  # the share of an untruncated distribution beyond its longest sequence: an assumption, see `Lengths`
_BYTES_PER_TOKEN = 4  # of English text and code, for vocabularies of 100,000 tokens or more


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """A log-normal distribution of tokens per sequence, cut off at `longest`.

    Its mean is the published one. A mean and a maximum don't determine a shape, so one thing is assumed: before the
    cut, 1% of the distribution is beyond the maximum.
    """

    mean: float
    longest: int
    source: str


NAMED = {
    "chat": Lengths(
        mean=1_872,
        longest=16_384,
        source="mean of WildChat (2.54 turns of 737 tokens): arXiv 2405.01470; longest: assumed",
    ),
    "longalign": Lengths(mean=16_500, longest=65_536, source="mean and longest (64K): arXiv 2601.19362"),
    "swe-smith": Lengths(mean=34_700, longest=131_072, source="mean: arXiv 2601.19362; longest (128K): assumed"),
    "aime": Lengths(mean=9_000, longest=32_768, source="mean (about 9K): arXiv 2601.19362; longest (32K): assumed"),
}


def named_lengths(name: str, count: int, *, seed: int = 0) -> list[int]:
    """`count` lengths in tokens, drawn by `seed` as in a known data set.

    name: "chat", "longalign", "swe-smith" or "aime".

    Raises ValueError for another name or a count below 1.
    """
    if name not in NAMED:
        raise ValueError(f"lengths {name!r} are not known: give one of {', '.join(NAMED)}, or a file")
    if count < 1:
        raise ValueError(f"count is {count}: draw 1 length or more")
    mu, sigma = log_normal(NAMED[name])
    normal, longest = NormalDist(mu, sigma), NAMED[name].longest
    generator = random.Random(seed)
    inside = normal.cdf(math.log(longest))
    return [
        max(1, min(longest, round(math.exp(normal.inv_cdf(generator.uniform(1e-12, inside)))))) for _ in range(count)
    ]


def log_normal(lengths: Lengths) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm that satisfy the conditions of `Lengths`."""
    top, z = math.log(lengths.longest), NormalDist().inv_cdf(1 - _OVER)

    def mean(sigma: float) -> float:
        mu = top - z * sigma
        return math.exp(mu + sigma**2 / 2) * NormalDist().cdf(z - sigma) / (1 - _OVER)

    low, high = 1e-3, 3.0  # the mean falls as sigma grows
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) > lengths.mean else (low, middle)
    return top - z * low, low


def lengths_of_file(path: str | Path) -> tuple[list[int], str]:
    """Tokens of each sequence of a file, and a description of their origin.

    path: of one number per line, of JSON records or of texts. For texts tokens are estimated: one per 4 bytes of UTF-8.

    Raises ValueError for a file without lengths, OSError if it can't be read.
    """
    texts = 0

    def estimate(record: Record) -> int:
        nonlocal texts
        texts += 1
        parts = [message_text(each) for each in record.messages or ()] + [record.prompt or "", record.completion]
        size = sum(len(part.encode()) for part in parts)
        return max(-(-size // _BYTES_PER_TOKEN), LEAST) if size else 0

    lengths = read_lengths(path, count_tokens=estimate)
    how = f"{len(lengths)} sequences of {path}"
    if texts:
        how += f", estimated at {_BYTES_PER_TOKEN} bytes per token (give `length` on each line for exact ones)"
    return lengths, how


def grouped(completions: Sequence[int], *, prompt: int, group: int) -> tuple[list[int], Relatives]:
    """Tokens of samples, each `prompt` tokens and a completion; what they share: `group` have one prompt."""
    count = len(completions)
    numbers = list(range(count))
    shared = np.array([prompt * (at % group > 0) for at in numbers])
    lengths = [prompt + each for each in completions]
    contents = [str(at // group) for at in numbers]
    return lengths, Relatives(lengths, numbers, shared, [prompt] * count, contents, [0] * count)


def draw(lengths: Sequence[int], *, samples: int, minibatches: int, seed: int = 0) -> list[list[int]]:
    """`minibatches` lists of `samples` lengths each, without repetition within one, from passes that `seed` shuffles.

    Raises ValueError if there are fewer lengths than `samples`.
    """
    return [[lengths[at] for at in numbers] for numbers in _draw(len(lengths), samples, minibatches, seed)]


def _draw(count: int, samples: int, minibatches: int, seed: int, relatives: Relatives | None = None) -> list[list[int]]:
    """As `draw`, the numbers of lengths. `relatives`: of these; prefix groups stay together."""
    if count < samples:
        raise ValueError(
            f"{count} sequences can't fill a minibatch of {samples} (ranks x samples per rank): give more "
            "sequences, fewer --gpus, or a smaller --minibatch"
        )
    generator = random.Random(seed)
    family = relatives and relatives.family_numbers(most=samples)
    drawn: list[list[int]] = []
    while len(drawn) < minibatches:
        order = list(range(count))
        generator.shuffle(order)
        if family is not None:
            order = in_families(order, family, most=samples, seed=f"{seed} {len(drawn)}")
        drawn += [order[i : i + samples] for i in range(0, count - samples + 1, samples)]
    return drawn[:minibatches]
