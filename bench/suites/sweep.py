"""Runs with adapters over one frozen base, against FSDP2 run after run on all ranks, and processes with whole bases.

    python -m bench.suites.sweep OUT.json [--samples 2] [--rounds 7] [--quick]

Every arm trains the same runs on the same samples, round after round in a rotating order. Rounds have different
samples, so intervals are over draws of lengths too. Bases and models are made before; a run begins with its adapters'
first values and an optimizer. Everything was fixed before anything was measured. Raises if losses of arms differ.
`--samples`: per step, by default one per rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from odc_triton import fully_shard, own_mesh, publish, serving
from odc_triton.balance import CostModel, MinibatchSampler, store_counter
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm
from odc_triton.comm.layout import find_units
from odc_triton.hf import enable_packing
from odc_triton.jobs.data.dataset import TokenizedDataset
from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.report import table
from odc_triton.jobs.train.model import add_adapters
from odc_triton.objectives import CrossEntropy, run_step
from odc_triton.packs.collate import PackedDataset, count_target_tokens, pack_collate
from odc_triton.step import Terms

from .. import quiet
from ..cut import cut, scaled_minibatches
from ..demo import CONFIG, LENGTHS, RANKS, TOKEN_CAP
from ..harness import PeakMemory, Work, gather, in_turn, median_ratio, open_job, set_torch_up, single_thread_environment
from ..provenance import about, options_of, save_parts
from ..variants import CLIP_NORM, Setting, shard_by_fsdp2

RUNS, STEPS, ROUNDS = 8, 4, 7
LEARNING_RATES, ADAPTER_RANK = (1e-3, 3e-3), 16
TOLERANCE = 1e-4  # of losses: sums over ranks and packs in other orders, in fp32
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """`together`: all ranks train each run, one after the other; else a free rank takes the next one, costliest first.
    `reshard`: of FSDP2, after forward.
    """

    kind: Literal["odc", "fsdp2", "plain"]
    together: bool
    balance: str = "mini"
    reshard: bool | None = None


ARMS = {
    "runs over one base": Arm(kind="odc", together=False),
    "FSDP2 + global packing, run after run": Arm(kind="fsdp2", together=True, balance="global"),
    "FSDP2 no reshard + LB-Mini, run after run": Arm(kind="fsdp2", together=True, reshard=False),
    "a whole base per process": Arm(kind="plain", together=False),
    "ODC + LB-Mini, run after run": Arm(kind="odc", together=True),
}
OURS, RESHARD, NO_RESHARD, COPIES, ODC = ARMS


@dataclass(frozen=True, kw_only=True)
class Run:
    """`samples`: per step. `cost`: of all samples; `shared_cost`: of the slowest rank of each step, added up."""

    data: str
    samples: int
    lr: float
    seed: int
    cost: float = 0.0
    shared_cost: float = 0.0

    def minibatches(self, cost: CostModel, balance: str, *, rank: int, ranks: int) -> Iterator[Any]:
        """This rank's packs. The samples of a step depend neither on `balance` nor on `ranks`."""
        data = TokenizedDataset.load(self.data)
        how = {"seed": self.seed, "cost": cost, "targets": data.target_counts.tolist(), "rank": rank, "world": ranks}
        return iter(MinibatchSampler(data.lengths.tolist(), self.samples // ranks, TOKEN_CAP, balance, **how))


Rounds = list[list[Run]]


def prepare(folder: Path, work: Work, *, rounds: int, steps: int, samples: int) -> Rounds:
    """Writes the base and samples of LongAlign-like lengths into `folder`. Of each round the runs, costliest first."""
    work.build().save_pretrained(folder / "base")
    cost, numbers, made = work.cost(), np.random.default_rng(0), []
    for round_ in range(rounds):
        runs = []
        for number in range(RUNS):
            how = {"longest": TOKEN_CAP, "samples": samples, "minibatches": steps, "seed": round_ * RUNS + number}
            lengths, _ = scaled_minibatches(LENGTHS, **how)
            text = numbers.geometric(0.02, sum(lengths)) % work.config["vocab_size"]  # uneven: there is much to learn
            cut(text, lengths).save(path := folder / f"{round_}-{number}.npz")
            lr, costs = LEARNING_RATES[number % len(LEARNING_RATES)], []
            run = Run(data=str(path), samples=samples, lr=lr, seed=number)
            for ranks in (1, RANKS):
                packs = [run.minibatches(cost, "mini", rank=rank, ranks=ranks) for rank in range(ranks)]
                loads = [[sum(cost.samples([lengths[i] for p in own for i in p])) for own in of] for of in packs]
                costs.append(sum(map(max, zip(*loads, strict=True))))
            runs.append(replace(run, cost=costs[0], shared_cost=costs[1]))
        made.append(sorted(runs, key=lambda run: -run.cost))
    return made


class Trainer:
    """Trains runs as `arm` does, one after the other with one model, whose adapters it sets. Collective."""

    def __init__(self, arm: Arm, work: Work, folder: Path, on_base: Callable[[], None] = lambda: None) -> None:
        self.arm, self.cost, folder = arm, work.cost(), str(folder / "base")
        if arm.kind == "odc":
            self.base = fully_shard(meta_causal_lm(model=folder).requires_grad_(False))
            load_pretrained_shards(self.base, folder)
        model = meta_causal_lm(model=folder) if arm.kind == "odc" else work.build()
        on_base()
        enable_packing(model)
        model = add_adapters(model, rank=ADAPTER_RANK, alpha=None, targets="all-linear").train()
        if arm.kind == "odc":
            mesh = own_mesh(range(RANKS) if arm.together else [dist.get_rank()])
            model = fully_shard(model, mesh=mesh, base=self.base)
        elif arm.kind == "fsdp2":
            blocks = [model.get_submodule(name) for name in find_units(model)]
            shard_by_fsdp2(model, blocks, Setting(), reshard_after_forward=arm.reshard)
        self.model = model

    def turns(self, runs: list[Run]) -> Iterator[Run]:
        """Those that this rank trains."""
        if self.arm.together:
            yield from runs
            return
        counter = store_counter()
        while (taken := counter.add("runs", 1)) <= len(runs):
            yield runs[taken - 1]

    def serving(self) -> contextlib.AbstractContextManager[None]:
        return serving(self.base) if self.arm.kind == "odc" else contextlib.nullcontext()

    def base_bytes(self) -> int:
        """Of the base's parameters, what this rank holds all the time."""
        model = self.base if self.arm.kind == "odc" else self.model
        return sum(local(each).nbytes for each in model.parameters() if not each.requires_grad)

    def train(self, run: Run) -> dict[str, Any]:
        """This rank's parts of the losses, and a digest of its adapters."""
        begun_s, model, data = time.monotonic(), self.model, PackedDataset(TokenizedDataset.load(run.data))
        adapters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        numbers = torch.Generator().manual_seed(run.seed)
        with torch.no_grad():
            for name, each in adapters.items():
                value = torch.zeros(each.shape)
                if "lora_A" in name:
                    value.uniform_(-1, 1, generator=numbers).div_(math.sqrt(value.shape[1]))
                if isinstance(each, DTensor):
                    value = local(distribute_tensor(value, each.device_mesh, each.placements, src_data_rank=None))
                local(each).copy_(value)
        if self.arm.kind == "odc":
            publish(model)
        optimizer = torch.optim.AdamW(adapters.values(), lr=run.lr, fused=True)
        rank, ranks = (dist.get_rank(), RANKS) if self.arm.together else (0, 1)
        losses = []
        for packs in run.minibatches(self.cost, self.arm.balance, rank=rank, ranks=ranks):
            losses.append(self.gradients(packs, data, ranks))
            nn.utils.clip_grad_norm_(adapters.values(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
        values = torch.cat([local(each).detach().flatten() for each in adapters.values()])
        digest = hashlib.sha256(values.numpy()).hexdigest()
        return {"run": run.seed, "seconds": time.monotonic() - begun_s, "losses": losses, "digest": digest}

    def gradients(self, packs: Any, data: PackedDataset, ranks: int) -> float:
        """Of a step. Returns this rank's part of the loss."""
        model = self.model
        if self.arm.kind == "odc":
            step = run_step(model, packs, CrossEntropy(), collate=lambda pack: pack_collate([data[pack]])[0])
            return step.loss / ranks
        made = pack_collate(data.__getitems__(packs))
        tokens, total = torch.tensor(count_target_tokens(made)), 0.0
        if ranks > 1:
            dist.all_reduce(tokens)
        for index, pack in enumerate(made):
            if self.arm.reshard is False:  # as `Fsdp2NoReshard`
                last = index == len(made) - 1
                model.set_requires_gradient_sync(last)
                model.set_reshard_after_backward(last)
                model.set_is_last_backward(last)
            loss, _ = CrossEntropy().loss(model, pack, Terms(number=int(tokens)))
            (loss * ranks).backward()  # FSDP2 averages
            total += loss.item()
        return total


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def measure(work: Work, folder: Path, rounds: Rounds) -> dict[str, list[dict[str, Any]]]:
    """By arm and round: seconds from the first rank's start to the last one's end, and each rank's part. Collective."""
    open_job()
    trainers, found = {name: Trainer(arm, work, folder) for name, arm in ARMS.items()}, {name: [] for name in ARMS}
    for number, runs in enumerate(rounds):
        for name, trainer in in_turn([*trainers.items()], number):
            gather(None)  # a barrier
            start_s, waited_s = time.monotonic(), quiet.waited_s()
            with trainer.serving():
                trained = [trainer.train(run) for run in trainer.turns(runs)]
                end_s = time.monotonic()
            starts, ends, waited, parts = zip(
                *gather((start_s, end_s, quiet.waited_s() - waited_s, trained)), strict=True
            )
            took_s = max(ends) - min(starts)
            if dist.get_rank() == 0:
                print(f"  round {number + 1}/{len(rounds)}  {name}: {took_s:.2f} s", flush=True)
            found[name].append(
                {"seconds": took_s, "ends_s": [end - min(starts) for end in ends], "waited_s": waited, "runs": parts}
            )
    dist.destroy_process_group()
    return found


def memory(name: str, folders: tuple[Path, Path], works: tuple[Work, Work], runs: tuple[Run, Run]) -> dict[str, int]:
    """Bytes per rank, the mean, as a shared page counts for those that touched it. The base's parameters that a
    rank holds; and measured, its own memory and its part of what is shared, above the process before: once it has the
    base, which FSDP2 shards later; the model with adapters; at the peak of the run. Collective.

    The first of each pair is small and makes libraries allocate what they do on first use.
    """
    open_job()
    set_torch_up()
    watch, libc, at = PeakMemory(every_s=0.005), ctypes.CDLL(None), [0]

    def look() -> None:
        gather(gc.collect())
        libc.malloc_trim(0)
        at.append(sum(watch.read()))

    for folder, work, run in zip(folders, works, runs, strict=True):
        trainer = None
        at.clear()
        look()
        trainer = Trainer(ARMS[name], work, folder, look)
        look()
        watch.private_bytes = 0
        with watch, trainer.serving():
            trainer.train(run)
    before, *after = *at, watch.peak()
    found = gather((trainer.base_bytes(), *(each - before for each in after)))
    dist.destroy_process_group()
    means = [sum(each) // RANKS for each in zip(*found, strict=True)]
    return dict(zip(("base", "base_measured", "at_rest", "peak"), means, strict=True))


def bound(runs: list[Run]) -> float:
    """Time of the runs in turn over ours if only compute took time, and ranks waited after each step, or at the end."""
    ends = [0.0] * RANKS
    for run in runs:
        ends[ends.index(min(ends))] += run.cost
    return sum(run.shared_cost for run in runs) / max(ends)


def compared(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How far losses are from ours. Raises ValueError for arms that did not train alike."""
    losses, digests = {}, {}
    for name, rounds in found.items():
        of = losses[name] = np.zeros((len(rounds), RUNS, len(rounds[0]["runs"][0][0]["losses"])))
        for number, each in ((number, each) for number, of in enumerate(rounds) for own in of["runs"] for each in own):
            of[number, each["run"]] += each["losses"]
            digests.setdefault(name, {})[number, each["run"]] = each["digest"]
    ours, apart = losses[OURS], {name: float(np.abs(of / losses[OURS] - 1).max()) for name, of in losses.items()}
    if not max(apart.values()) <= TOLERANCE:
        raise ValueError(f"losses are up to {apart} apart, of which {TOLERANCE} is rounding: arms did not train alike")
    if len(np.unique(ours[..., -1])) < ours[..., -1].size:
        raise ValueError("runs end with equal losses, so arms can't be compared by them")
    return {"losses_apart": apart, "has_bits_of_copies": digests[OURS] == digests[COPIES]}


def report_of(found: dict[str, list[dict[str, Any]]], rounds: Rounds, bytes_of: dict[str, Any]) -> dict[str, Any]:
    seconds = {name: [of["seconds"] for of in each] for name, each in found.items()}
    fsdp2 = min((RESHARD, NO_RESHARD), key=lambda name: statistics.median(seconds[name]))
    turns = ([(of["seconds"], of["waited_s"]) for of in turn] for turn in zip(*found.values(), strict=True))
    pairs = {"fsdp2_over_ours": (fsdp2, OURS), "ours_over_copies": (OURS, COPIES), "odc_over_ours": (ODC, OURS)}
    pairs["fsdp2_over_odc"] = (fsdp2, ODC)
    return {
        "runs_per_hour": {name: 3600 * RUNS / statistics.median(of) for name, of in seconds.items()},
        **{key: median_ratio(seconds[one], seconds[other]) for key, (one, other) in pairs.items()},
        "fsdp2": fsdp2,
        "bound": statistics.mean(map(bound, rounds)),
        "bytes": bytes_of,
        "base_over_copies": {key: bytes_of[OURS][key] / bytes_of[COPIES][key] for key in ("base", "base_measured")},
        **compared(found),
        "disturbed": quiet.disturbed(turns),
        "rounds": found,
        "runs": [[asdict(run) | {"data": Path(run.data).stem} for run in runs] for runs in rounds],
    }


def main() -> None:
    options = options_of(__doc__, out="out", samples=RANKS, rounds=ROUNDS, quick=False)
    single_thread_environment()
    start_s, steps = time.monotonic(), 2 if options.quick else STEPS
    with tempfile.TemporaryDirectory() as scratch:
        folders = (Path(scratch, "small"), Path(scratch, "large"))
        works = [Work(dataset="", config=CONFIG | more, minibatches=[], token_cap=TOKEN_CAP) for more in (SMALL, {})]
        works = (works[0], works[0] if options.quick else works[1])
        small = prepare(folders[0], works[0], rounds=1, steps=1, samples=RANKS)
        rounds = prepare(folders[1], works[1], rounds=options.rounds, steps=steps, samples=options.samples)
        runs = (small[0][0], rounds[0][0])
        bytes_of = {name: launch(memory, name, folders, works, runs, ranks=RANKS)[0] for name in ARMS}
        found = launch(measure, works[1], folders[1], rounds, ranks=RANKS)[0]
    report = report_of(found, rounds, bytes_of)
    sizes = {"config": works[1].config, "steps": steps, "token_cap": TOKEN_CAP, "ranks": RANKS}
    sizes["took_s"] = time.monotonic() - start_s
    save_parts(options.out, **{f"samples_{options.samples}": report | sizes | about()})
    sizes_of = {name: [f"{each / 1e6:.1f}" for each in of.values()] for name, of in bytes_of.items()}
    rows = [[name, f"{rate:.0f}", *sizes_of[name]] for name, rate in report["runs_per_hour"].items()]
    print(table(rows, ("", "runs per hour", "base of a rank, MB", "measured", "with adapters", "peak")))
    keys = [key for key in report if "_over_" in key or key in ("bound", "losses_apart", "has_bits_of_copies")]
    print(*(f"{key}: {report[key]}" for key in keys), sep="\n")
    print(quiet.in_words(report["disturbed"], len(rounds)))


if __name__ == "__main__":
    main()
