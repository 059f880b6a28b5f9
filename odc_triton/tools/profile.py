"""`odc-triton profile`: a time profile of a few minibatches. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..jobs.data.lengths import read_lengths
from ..jobs.options.options import (
    REQUIRED,
    option,
    plain_paths,
    require_at_least,
    require_files,
    require_one_model,
    require_seed,
    require_token_cap,
    require_writable,
)
from ..jobs.reports.trace import (
    BARRIERS,
    CATEGORIES,
    OTHER,
    TimeSpan,
    category_of_kernel,
    category_of_operator,
    nested,
    overlapping,
)
from ..plan.strategies import BALANCES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..engine.module import Engine
    from ..packs.collate import Pack


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """What to profile."""

    out: str = option(REQUIRED, "folder for profile.json, timeline.png, trace.json and torch's traces")
    model: str | None = option(None, "a transformers causal LM: local folder or hub id")
    init: str | None = option(None, "config.json of a model with random weights, instead of --model")
    lengths: str | None = option(None, "file of lengths, one per line, or JSON lines; by default all are --token-cap")
    token_cap: int = option(2048, "most tokens in one pack, which is one microbatch")
    samples_per_rank: int = option(4, "samples per rank and minibatch")
    minibatches: int = option(3, "minibatches to measure, after one to warm up")
    balance: Literal[BALANCES] = option("mini", "how samples are assigned to the ranks")
    dtype: Literal["fp32", "bf16"] = option("fp32", "dtype of compute")
    replace_layers: bool = option(False, "attention, embedding, expert and linear layers read from and add to owners")
    fused_head: bool = option(False, "never compute full logits")
    gradient_checkpointing: bool = option(False, "recompute activations in backward")
    seed: int = option(0, "seed for the random weights, tokens and the samples' order")

    def __post_init__(self) -> None:
        plain_paths(self, "out", "model", "init", "lengths")
        require_one_model(self)
        require_at_least(self, 1, "samples_per_rank", "minibatches")
        require_token_cap(self)
        require_seed(self)
        require_files(self, "lengths")
        require_files(self, "init", or_folders=True)
        if self.lengths is not None:
            read_lengths(self.lengths, self.token_cap)
        require_writable("--out", self.out)
        if Path(self.out).exists() and any(Path(self.out).iterdir()):
            raise ValueError(f"--out is {self.out}, which is not empty; give a new folder")


def run_profile(options: ProfileOptions) -> dict[str, Any]:
    """Runs and measures the minibatches on this rank; returns seconds by category, wall time and tokens.

    Every rank of the job calls it. Each writes torch's own trace; rank 0 also writes the image and the events' trace.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    from ..base.events import Event
    from ..engine.api import engine_of
    from ..jobs.reports.report import save_timelines

    model, packs = _prepare(options)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-6)
    _step(model, optimizer, packs[0])
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if engine.heap.device.type == "cuda" else [])
    engine.drain("warming up")
    engine.exchange("start measuring", {})
    engine.events.drain()
    with profile(activities=activities) as record:
        start_s, start_ns = time.monotonic(), time.time_ns()
        for own in packs[1:]:
            _step(model, optimizer, own)
        engine.drain("measuring")
        end_s = time.monotonic()
    events = engine.events.drain()
    barriers = [TimeSpan(BARRIERS, e.start_s - start_s, e.end_s - start_s) for e in events if e.kind == "wait"]
    spans, sum_up = _spans(record, start_ns, engine)
    seconds = sum_up([*spans, *barriers], 0.0, end_s - start_s)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    record.export_chrome_trace(str(out / f"torch-{engine.rank}.json"))
    messages = engine.exchange("collect the timelines", {"events": [event.as_row() for event in events]})
    if engine.rank == 0:
        rows = [row for theirs in messages for row in theirs["events"]]
        save_timelines({"ODC": [Event.of_row(row) for row in rows]}, out, title="Where the ranks' time goes")
    engine.exchange("the timelines are drawn", {})
    tokens = sum(pack["input_ids"].numel() for own in packs[1:] for pack in own)
    return {"seconds": seconds, "wall_s": end_s - start_s, "tokens": tokens, "device": engine.heap.device.type}


def _prepare(options: ProfileOptions) -> tuple[nn.Module, list[list[Pack]]]:
    """The sharded model, and this rank's packs of every minibatch, the warm-up one first."""
    import torch

    from ..checkpoint import load_causal_lm
    from ..jobs.train.model import precision, replace
    from ..packs.collate import PackedDataset, pack_collate
    from ..packs.enable import enable_packing
    from ..plan.cost import CostModel
    from ..plan.sampler import MinibatchSampler
    from ..sharding.agree import default_mesh
    from ..sharding.shard_module import fully_shard

    mesh = default_mesh(timedelta(minutes=30))
    torch.manual_seed(options.seed)
    model = load_causal_lm(model=options.model, init=options.init)
    cost = CostModel.from_config(model.config.get_text_config())
    enable_packing(model)
    replace(model, options, mesh.get_rank())
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    fully_shard(model.train(), mesh=mesh, mp_policy=precision(options.dtype))
    lengths = read_lengths(options.lengths, options.token_cap) if options.lengths else [options.token_cap]
    wanted = options.samples_per_rank * mesh.size() * (options.minibatches + 1)
    lengths = (lengths * math.ceil(wanted / len(lengths)))[:wanted]
    sampler = MinibatchSampler(
        lengths,
        options.samples_per_rank,
        options.token_cap,
        balance=options.balance,
        seed=options.seed,
        rank=mesh.get_rank(),
        world=mesh.size(),
        cost=cost,
    )
    generator = torch.Generator().manual_seed(options.seed)
    vocabulary = model.config.get_text_config().vocab_size
    samples = PackedDataset(
        [{"input_ids": torch.randint(0, vocabulary, (length,), generator=generator)} for length in lengths]
    )
    return model, [pack_collate(samples.__getitems__(packs)) for packs in sampler]  # with the plan, as in training


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, packs: list[Pack]) -> None:
    import torch

    from ..objectives.cross_entropy import CrossEntropy
    from ..step import run_step

    run_step(model, packs, CrossEntropy())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _spans(record: Any, start_ns: int, engine: Engine) -> tuple[list[TimeSpan], Any]:
    """The spans, in seconds since `start_ns`, and the function that sums them up by category."""
    from torch.autograd import DeviceType

    events = record.profiler.kineto_results.events()
    if engine.heap.device.type == "cuda":
        ours = _names_of_our_kernels()
        ran = (event for event in events if event.device_type() == DeviceType.CUDA)
        on_device = [event for event in ran if not event.is_user_annotation()]
        return [
            TimeSpan(category_of_kernel(event.name(), ours), *_seconds(event, start_ns)) for event in on_device
        ], overlapping
    timed = sorted((*_seconds(event, start_ns), event.name()) for event in events if event.duration_ns() > 0)
    spans: list[TimeSpan] = []
    open_until: list[tuple[float, str]] = []  # the spans that enclose the next one
    for begin_s, end_s, name in sorted(timed, key=lambda part: (part[0], -part[1])):
        while open_until and open_until[-1][0] <= begin_s:
            open_until.pop()
        around = open_until[-1][1] if open_until else OTHER
        category = category_of_operator(name) or around
        open_until.append((end_s, category))
        spans.append(TimeSpan(category, begin_s, end_s))
    return spans, nested


def _seconds(event: Any, start_ns: int) -> tuple[float, float]:
    begin = event.start_ns() - start_ns
    return begin / 1e9, (begin + event.duration_ns()) / 1e9


def _names_of_our_kernels() -> frozenset[str]:
    import importlib
    import pkgutil

    import odc_kernels

    modules = [
        importlib.import_module(f"odc_kernels.{each.name}") for each in pkgutil.iter_modules(odc_kernels.__path__)
    ]
    return frozenset(name for module in modules for name in vars(module) if name.endswith("_kernel"))


def report(options: ProfileOptions, of_ranks: list[dict[str, Any]]) -> str:
    """Writes profile.json and returns the table: seconds and shares of the mean rank, and the range over all ranks."""
    from ..base.files import write_file
    from ..jobs.reports.report import table

    wall_s = max(of["wall_s"] for of in of_ranks)
    tokens = sum(of["tokens"] for of in of_ranks)
    rows = []
    for category in CATEGORIES:
        seconds = [of["seconds"][category] for of in of_ranks]
        mean = sum(seconds) / len(seconds)
        if max(seconds) > 0:
            rows.append([category, f"{mean:.3f}", f"{mean / wall_s:.1%}", f"{min(seconds):.3f} to {max(seconds):.3f}"])
    about = {"options": asdict(options), "ranks": of_ranks, "tokens_per_s": tokens / wall_s}
    write_file(Path(options.out) / "profile.json", (json.dumps(about, indent=1) + "\n").encode())
    return (
        f"{table(rows, ('time in', 'seconds, mean rank', 'share', 'fastest to slowest rank'))}\n"
        f"gather: reading parameters of other ranks; accumulate: adding gradients to them; barriers: waiting for other "
        f"ranks; idle: nothing recorded, as Python's own time\n"
        f"{tokens:,} tokens in {wall_s:.2f} s, {tokens / wall_s:,.0f} tokens/s, slowed by the profiler\n"
        f"In {options.out}: timeline.png and trace.json of all ranks, torch-0.json and so on of each (open traces in "
        f"ui.perfetto.dev), profile.json\n"
        f"Next: docs/slow.md says what to try for each"
    )
