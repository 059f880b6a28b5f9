"""Runs variants side by side: every variant in turn trains each minibatch, on the same samples, in one job."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from odc_triton.balance import CostModel, assign
from odc_triton.base.events import Event
from odc_triton.comm.process_group import rendezvous_url
from odc_triton.jobs.data.dataset import TokenizedDataset
from odc_triton.packs.collate import PackedDataset, count_target_tokens, pack_collate, to_device
from odc_triton.plan.plan import MinibatchPacks
from odc_triton.plan.planner import SPLIT, make_plan
from odc_triton.plan.relatives import find_relatives
from odc_triton.plan.samples import Limits, Samples
from odc_triton.plan.split import readable_tokens

from . import quiet, trees
from .variants import Pack, Setting, Variant
from .whole import whole

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The model and the samples to train on: fixed before anything is measured."""

    dataset: str  # path of a TokenizedDataset
    config: dict  # a Qwen2Config's
    minibatches: list[list[int]]  # indices of all ranks' samples
    token_cap: int
    seed: int = 0

    def data(self) -> Any:
        """The samples, by index, and their `lengths`."""
        return TokenizedDataset.load(self.dataset)

    def build(self) -> nn.Module:
        """The model: random weights, the same for every variant and rank."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        torch.manual_seed(self.seed)
        return Qwen2ForCausalLM(Qwen2Config(**self.config))

    def cost(self) -> CostModel:
        from transformers import Qwen2Config

        return CostModel.from_config(Qwen2Config(**self.config))


@dataclass
class Measured:
    """One variant's minibatches, in order. Times in seconds, from all ranks' start to the last rank's end.

    `waited_s`: by minibatch and rank, for a core. `repeats`: how often the minibatch was measured again, the same for
    all variants. Losses are of the first time, all else of the time that counts. `apart`: see `gradients_apart`.
    """

    name: str
    balance: str
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    microbatches: list[list[int]] = field(default_factory=list)
    waited_s: list[list[float]] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    apart: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Minibatch:
    """One variant's run of one minibatch, all ranks together. Times in seconds of `time.monotonic`."""

    start_s: float  # of the first rank
    end_s: float  # of the last rank
    step_seconds: float  # of the slowest rank
    loss: float  # per target token
    microbatches: list[int]  # by rank
    waited_s: list[float]  # for a core, by rank

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_disturbed(self) -> bool:
        return quiet.is_disturbed(self.seconds, self.waited_s)


def open_job(setting: Setting | None = None) -> tuple[int, int]:
    """Rank and world of this process. It uses one thread; under "cuda" its share of the cores, for setup only, and
    the GPU of its local rank.
    """
    torch.set_num_threads(1)
    kinds = "gloo"
    if setting is not None and setting.device == "cuda":
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // int(os.environ["WORLD_SIZE"]), 1))
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        kinds = "cpu:gloo,cuda:nccl"
    if not dist.is_initialized():
        dist.init_process_group(kinds, rendezvous_url(), timeout=timedelta(minutes=5))
    return dist.get_rank(), dist.get_world_size()


def gather(value: object) -> list:
    """Every rank's value. Collective."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    dist.barrier()  # else gloo's thread may release tensors of this, which needs the GIL, while the group ends
    return values


def in_turn(items: Sequence[T], round_: int) -> list[T]:
    """All items, in each round starting with another one."""
    first = round_ % len(items)
    return [*items[first:], *items[:first]]


def split_tokens(work: Work, ranks: int, balance: str = SPLIT) -> int:
    """Of each rank, the most tokens of one minibatch that others may read: what a `MinibatchSampler` would take."""
    data = work.data()
    lengths = data.lengths
    if balance in trees.WAYS:
        of_minibatches = [find_relatives([data[index] for index in samples]) for samples in work.minibatches]
        return max(map(trees.shared_tokens, of_minibatches))
    return readable_tokens(
        [int(lengths[index]) for samples in work.minibatches for index in samples],
        ranks=ranks,
        samples=max(map(len, work.minibatches)),
        token_cap=work.token_cap,
        cost=work.cost(),
    )


def build(kind: type[Variant], work: Work, setting: Setting | None = None) -> Variant:
    """The variant, ready for the minibatches of `work`. Collective."""
    return kind(work.build, setting, split_tokens=split_tokens(work, dist.get_world_size(), kind.balance))


def assign_packs(
    work: Work, data: Any, samples: list[int], balance: str, cost: CostModel, *, ranks: int | None = None
) -> list[MinibatchPacks]:
    """Every rank's collated packs of one minibatch. `ranks`: by default this job's."""
    ranks = ranks or dist.get_world_size()
    lengths = [int(data.lengths[index]) for index in samples]
    how = {"ranks": ranks, "token_cap": work.token_cap, "cost": cost}
    if balance == SPLIT:
        limits = Limits(ranks=ranks, token_cap=work.token_cap, split_tokens=split_tokens(work, ranks))
        plan = make_plan(Samples.of(limits.checked(lengths), cost, names=samples), limits, SPLIT)
        assigned = [plan.packs(rank) for rank in range(ranks)]
    elif balance in trees.WAYS:
        data = [data[index] for index in samples]
        assigned = trees.assign_trees(balance, lengths, find_relatives(data), **how)
    else:
        of_ranks = assign(lengths, balance=balance, **how)
        assigned = [MinibatchPacks([samples[member] for member in pack] for pack in packs) for packs in of_ranks]
    packed = PackedDataset(data)
    return [pack_collate(packed.__getitems__(packs)) for packs in assigned]


def train_minibatch(variant: Variant, work: Work, data: Any, cost: CostModel, index: int, number: int) -> Minibatch:
    """Trains minibatch `index` of `work` once; starts with a barrier of all ranks. Collective.

    `number`: how many the variant has trained before; its events carry it.
    """
    assigned = assign_packs(work, data, work.minibatches[index], variant.balance, cost)
    return timed(variant, assigned[dist.get_rank()], sum(count_target_tokens(packs) for packs in assigned), number)


def timed(variant: Variant, own: Sequence[Pack], total: int, number: int) -> Minibatch:
    """Trains this rank's packs of a minibatch with `total` targets; starts with a barrier of all ranks. Collective."""
    setting = variant.setting
    own = MinibatchPacks.like(own, (to_device(pack, setting.here) for pack in own))
    variant.start_minibatch(number)
    setting.synchronize()
    gather(None)  # a barrier
    start_s, waited_s = time.monotonic(), quiet.waited_s()
    loss = variant.gradients(own, total)
    landed_s = time.monotonic()
    variant.step()
    setting.synchronize()
    spans = gather((start_s, landed_s, time.monotonic(), loss, len(own), quiet.waited_s() - waited_s))
    return Minibatch(
        start_s=min(span[0] for span in spans),
        end_s=max(span[2] for span in spans),
        step_seconds=max(span[2] - span[1] for span in spans),
        loss=sum(span[3] for span in spans) / total,
        microbatches=[span[4] for span in spans],
        waited_s=[span[5] for span in spans],
    )


def gradients_apart(variants: Sequence[Variant], works: Sequence[Work], data: Any, cost: CostModel) -> list[float]:
    """By variant, how far its gradients of the last minibatch are from the first one's: of the worst parameter, the
    largest difference over its largest gradient. Collective.
    """
    apart, wanted = [], {}
    for variant, work in zip(variants, works, strict=True):
        assigned = assign_packs(work, data, work.minibatches[-1], variant.balance, cost)
        variant.gradients(assigned[dist.get_rank()], sum(count_target_tokens(packs) for packs in assigned))
        found = {}
        for name, value in variant.model.named_parameters():
            found[name.removeprefix("module.")] = whole(value.grad)
        wanted = wanted or found
        apart.append(max(float((found[name] - of).abs().max() / of.abs().max()) for name, of in wanted.items()))
        variant.optimizer.zero_grad()
    return apart


def compare(
    kinds: Sequence[type[Variant]],
    work: Work,
    progress: bool = False,
    warm_up: int = 0,
    caps: Sequence[int] | None = None,
    most_apart: float | None = None,
) -> list[Measured]:
    """Trains every variant on all of `work`, interleaved minibatch by minibatch in a rotating order. Collective.

    `caps`: each variant's token cap, by default that of `work`. `most_apart`: raises ValueError before anything is
    timed if `gradients_apart` of a variant are more.

    At the end, when others may have left the machine, a minibatch that was disturbed in any variant's turn is measured
    again for all of them, a few times at most; the least disturbed time counts, whatever it took. See [Note: what
    counts as disturbed]. Not so the first `warm_up`. `progress`: rank 0 prints a line after each.
    """
    rank, _ = open_job()
    data, cost, count = work.data(), work.cost(), len(work.minibatches)
    works = [replace(work, token_cap=cap) for cap in caps or [work.token_cap] * len(kinds)]
    variants = [build(*each) for each in zip(kinds, works, strict=True)]
    apart = [0.0] * len(kinds) if most_apart is None else gradients_apart(variants, works, data, cost)
    if most_apart is not None and max(apart) > most_apart:
        raise ValueError(f"gradients are up to {apart} apart, of {[kind.name for kind in kinds]}: at most {most_apart}")
    for variant in variants:
        variant.events()  # those of building it

    def turns(index: int, repeat: int = 0) -> list[tuple[Minibatch, list[Event]]]:
        """One minibatch by all variants: by variant what it took, and this rank's events."""
        ran = {}
        for variant, of in in_turn(list(zip(variants, works, strict=True)), index + repeat):
            ran[variant] = took = train_minibatch(variant, of, data, cost, index, index)
            if rank == 0 and progress:
                marks = ", again" * (repeat > 0) + ", disturbed" * took.is_disturbed
                print(f"  minibatch {index + 1}/{count}  {variant.name}: {took.seconds:.2f} s{marks}", flush=True)
        return [(ran[v], [replace(event, minibatch=index) for event in v.events()]) for v in variants]

    def waiting(of: list[tuple[Minibatch, list[Event]]]) -> float:
        return max(quiet.share(took.seconds, took.waited_s) for took, _ in of)

    kept = [turns(index) for index in range(count)]
    losses = [[took.loss for took, _ in of] for of in kept]  # of the first time: later ones have trained more
    repeats, repeats_left = [0] * count, quiet.most_repeats(count - warm_up)
    for repeat in range(1, quiet.MOST_REPEATS + 1):
        again = [index for index in range(warm_up, count) if waiting(kept[index]) > quiet.MOST_WAITING][:repeats_left]
        repeats_left -= len(again)
        for index in again:
            repeats[index] += 1
            kept[index] = min(kept[index], turns(index, repeat), key=waiting)
    results = []
    for place, kind in enumerate(kinds):
        of = [each[place] for each in kept]
        results.append(
            Measured(
                name=kind.name,
                balance=kind.balance,
                seconds=[took.seconds for took, _ in of],
                step_seconds=[took.step_seconds for took, _ in of],
                losses=[each[place] for each in losses],
                microbatches=[took.microbatches for took, _ in of],
                waited_s=[took.waited_s for took, _ in of],
                repeats=repeats,
                apart=apart[place],
                events=[event for events in gather([e for _, own in of for e in own]) for event in events],
            )
        )
    dist.destroy_process_group()
    return results


def disturbed(results: Sequence[Measured], warm_up: int = 0) -> dict[str, int | None]:
    """Of the minibatches after the first `warm_up`, and of those of their times that count."""
    turns = [zip(each.seconds[warm_up:], each.waited_s[warm_up:], strict=True) for each in results]
    again = sum(count > 0 for count in results[0].repeats[warm_up:])
    return quiet.disturbed(zip(*turns, strict=True), measured_anew=again)


class PeakMemory:
    """Watches this process's private and shared memory while a `with` block runs."""

    def __init__(self, every_s: float = 0.02) -> None:
        self._every_s = every_s
        self._stop = threading.Event()
        self.private_bytes = 0  # the peak

    @staticmethod
    def read() -> tuple[int, int]:
        """Bytes of this process's own (anonymous) memory, and its share of the shared memory (PSS of shmem)."""
        values = {}
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
            key, amount = line.split(":")
            values[key] = int(amount.split()[0]) * 1024
        return values["Anonymous"], values["Pss_Shmem"]

    def peak(self) -> int:
        """The most private bytes so far, and this process's share of what is shared now."""
        private, shared = self.read()
        return max(self.private_bytes, private) + shared

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.private_bytes = max(self.private_bytes, self.read()[0])

    def __enter__(self) -> PeakMemory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def set_torch_up() -> None:
    """Allocates what torch itself allocates on first use, so that it does not count as a variant's memory."""
    nn.Linear(64, 64)(torch.randn(64, 64)).sum().backward()


def peak_memory(kind: type[Variant], work: Work) -> dict[str, int]:
    """Peak bytes over the ranks for one variant alone, above the process before it had a model. Collective."""
    open_job()
    data, cost = work.data(), work.cost()
    set_torch_up()
    watch = PeakMemory()
    before, _ = watch.read()
    variant = build(kind, work)
    with watch:
        train_minibatch(variant, work, data, cost, 0, 0)
    dist.barrier()
    after = gather((watch.private_bytes - before, *watch.read()))
    dist.destroy_process_group()
    return {
        "peak_private_bytes": max(peak for peak, _, _ in after),
        "private_after_step_bytes": max(private - before for _, private, _ in after),
        "shared_bytes": sum(shared for _, _, shared in after),
    }


def bootstrap_ratio(slow: Sequence[float], fast: Sequence[float], *, draws: int = 10_000) -> dict[str, float]:
    """Total time of `slow` over that of `fast`, with a 95% interval over interleaved minibatches."""
    generator = random.Random(0)
    count = len(slow)
    ratios = []
    for _ in range(draws):
        picks = [generator.randrange(count) for _ in range(count)]
        ratios.append(sum(slow[i] for i in picks) / sum(fast[i] for i in picks))
    ratios.sort()
    return {"ratio": sum(slow) / sum(fast), "low": ratios[int(0.025 * draws)], "high": ratios[int(0.975 * draws)]}


def median_ratio(slow: Sequence[float], fast: Sequence[float], *, draws: int = 10_000) -> dict[str, float]:
    """The median of `slow` over `fast` by interleaved minibatch, with a 95% interval."""
    generator = random.Random(0)
    ratios = [one / other for one, other in zip(slow, fast, strict=True)]
    medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(draws))
    return {"ratio": statistics.median(ratios), "low": medians[int(0.025 * draws)], "high": medians[int(0.975 * draws)]}


def single_thread_environment() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
