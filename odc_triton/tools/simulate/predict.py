"""`odc-triton simulate`: options in, a ranking out."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from ...base.files import write_file
from ...jobs.data.dataset import TokenizedDataset
from ...jobs.options.options import REQUIRED, option, plain_paths, require_at_least, require_files, require_writable
from ...jobs.reports.report import save_timeline, table
from ...jobs.reports.trace import save_trace
from ...plan.relatives import Relatives, find_relatives
from .hardware import find_device
from .models import MODELS, Model
from .study import (
    BASELINE,
    COLUMNS,
    DRAWN,
    NAMED,
    Row,
    advice,
    cells,
    grouped,
    lengths_of_file,
    make_job,
    named_lengths,
    rank_settings,
    usual_links,
    verdict,
)

_MOST_SAMPLES = 100_000  # per GPU and step
_USUAL_MODEL = "qwen2.5-7b"


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The simulated job."""

    lengths: str = option(REQUIRED, "chat, longalign, swe-smith, aime, or a file: .jsonl, .json, .npz, or numbers")
    model: str | None = option(
        None, f"{', '.join(MODELS)}, or a transformers model: local folder or hub id; by default {_USUAL_MODEL}"
    )
    init: str | None = option(None, "config.json of a model, instead of --model")
    gpus: int = option(8, "GPUs of the job, all nodes together")
    nodes: int = option(1, "nodes, with equally many GPUs each: shards within a node, a replica on each")
    gpu: str = option("a100", "v100, a100, a6000, l40s, h100, h200 or b200")
    minibatch: str = option("1,2,4,8", "samples per GPU and step; several with commas; too large ones are left out")
    token_cap: int | None = option(None, "most tokens in a microbatch; by default the longest sequence, at least 4096")
    split_sequences: bool = option(False, "also split long sequences over each node's GPUs, as one more setting")
    share_prefixes: bool = option(
        False, "also compute once what samples share, as one more setting: of a prepared .npz, or with --group"
    )
    group: int | None = option(None, "with --share-prefixes: so many of --lengths are completions of one prompt")
    prompt_tokens: int | None = option(None, "with --group: tokens of each prompt, before the completions")
    lora_rank: int | None = option(None, "train adapters of this rank on all linear layers, over a frozen base in bf16")
    runs: int | None = option(None, "with --lora-rank: also so many runs at a time over one base, each alone on a GPU")
    gradient_checkpointing: bool = option(
        True, "recompute activations in backward: less memory, a third more work", once="checkpointing"
    )
    fused_head: bool = option(True, "never compute full logits: less memory")
    efficiency: float = option(0.5, "achieved share of the GPU's peak FLOP/s")
    nic_gbs: float | None = option(None, "GB/s per GPU and direction between nodes; by default typical of the GPU")
    slow: float = option(1.0, "one rank computes this many times slower")
    trials: int | None = option(None, "minibatches drawn per setting; by default 16, fewer beyond 32 GPUs")
    seed: int = option(0, "seed for the drawn minibatches")
    out: str | None = option(None, "folder to write table.md, simulate.json, timeline.png and trace.json to")

    def __post_init__(self) -> None:
        plain_paths(self, "lengths", "model", "init", "out")
        if self.model is not None and self.init is not None:
            raise ValueError("give either --model or --init (a config.json)")
        require_files(self, "init", or_folders=True)
        require_at_least(self, 1, "gpus", "nodes", "trials", "token_cap", "group", "prompt_tokens", "lora_rank", "runs")
        if self.runs and not self.lora_rank:
            raise ValueError("--runs are of adapters over one base: give --lora-rank too")
        if (self.group is None) != (self.prompt_tokens is None) or (self.group and not self.share_prefixes):
            raise ValueError("--group, --prompt-tokens and --share-prefixes: give all three, or --share-prefixes alone")
        if self.gpus % self.nodes:
            raise ValueError(f"{self.gpus} gpus don't divide by {self.nodes} nodes: give a multiple of {self.nodes}")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"--efficiency is {self.efficiency}: it must be above 0 and at most 1")
        if self.nic_gbs is not None and not 0 < self.nic_gbs < math.inf:
            raise ValueError(f"--nic-gbs is {self.nic_gbs}: it must be positive and finite")
        if not 0 < self.slow < math.inf:
            raise ValueError(f"--slow is {self.slow}: it must be positive and finite, 1.3 for 30% longer")
        if self.out is not None:
            require_writable("--out", self.out)
        if not self.minibatches:
            raise ValueError("--minibatch is empty: give samples per GPU, such as 1,2,4,8")

    @property
    def minibatches(self) -> list[int]:
        """Raises ValueError for a part that is not a whole number of at least 1."""
        sizes = []
        for part in filter(None, (part.strip() for part in self.minibatch.split(","))):
            if not part.isdecimal() or int(part) < 1:
                raise ValueError(f"--minibatch has {part!r}: give whole numbers of at least 1, separated by commas")
            if int(part) > _MOST_SAMPLES:
                raise ValueError(f"--minibatch has {part}: give at most {_MOST_SAMPLES} samples per GPU")
            sizes.append(int(part))
        return sizes


_USUAL_CAP = 4096  # the default of `train sft`: short sequences share packs there
_DRAWN = 10_000  # lengths of a named distribution


def main(options: SimulateOptions) -> int:
    """Prints the ranking, writes it to `options.out`; returns the exit status. Raises ValueError and OSError."""
    lengths, whence, relatives = _lengths(options)
    model = Model.find(options.init or options.model or _USUAL_MODEL)
    model = model.with_adapters(options.lora_rank) if options.lora_rank else model
    kind, each = find_device(options.gpu), options.gpus // options.nodes
    links = usual_links(kind, each, nodes=options.nodes, nic_gbs=options.nic_gbs)
    machine = f"{each} x {options.gpu.upper()}, {links.gbs:.0f} GB/s each"
    if options.nodes > 1:
        machine = f"{options.nodes} nodes of {machine}"
    cap = options.token_cap or max(_USUAL_CAP, *lengths)
    over = sum(length > cap for length in lengths)
    if over:
        raise ValueError(
            f"{over} of {len(lengths)} sequences are longer than --token-cap {cap} (the longest: {max(lengths)}): "
            "raise it, or truncate or drop them"
        )
    job = make_job(
        model,
        kind,
        links,
        efficiency=options.efficiency,
        checkpointing=options.gradient_checkpointing,
        fused_head=options.fused_head,
        slow={} if options.slow == 1 else {0: options.slow},
    )
    filled = len(lengths) // options.gpus
    sizes = [size for size in options.minibatches if size <= filled] or options.minibatches[:1]  # which raises
    drawn = sizes[len(sizes) // 2]
    trials = (options.trials or max(4, min(16, 512 // options.gpus))) * (options.runs or 1)
    rows = rank_settings(
        lengths,
        sizes,
        job=job,
        token_cap=cap,
        memory_gb=kind.memory_gb,
        trials=trials,
        seed=options.seed,
        timeline_of=drawn if options.out else None,
        split=options.split_sequences,
        relatives=relatives,
        runs=options.runs or 0,
    )
    active = f", {_count(model.active_parameters)} active" if model.active_parameters < model.parameters else ""
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    head = (
        f"Simulated, not measured: {model.name} ({_count(model.parameters)} parameters{active}) on {machine}\n"
        f"lengths: {whence}: mean {mean:,.0f}, longest {longest:,} tokens, token cap {cap:,}\n"
        f"mean of {trials} minibatches, fastest setting first"
    )
    if len(sizes) < len(options.minibatches):
        head += f"\nminibatches of more than {filled} per GPU are left out: the {len(lengths)} sequences can't fill one"
    shown = table(cells(rows), COLUMNS)
    legend = (
        f"speed-up: over {BASELINE} with the same samples per GPU. idle: share of the time without compute. exposed "
        f"comm.: the part of it that waits for transfers. GB/GPU: peak of the fullest GPU"
    )
    said = f"{head}\n\n{shown}\n{legend}\n\n{verdict(rows)}\n{advice(rows)}"
    if options.runs:
        fitting = [[row for row in rows if row.fits and row.samples == size][:2] for size in sizes]  # the two fastest
        hourly = (f"{3.6 / row.outcome.step_s:.3g} by {row.name} ({row.samples})" for best in fitting for row in best)
        said += f"\nruns of 1,000 steps per hour, by setting (samples per GPU): {', '.join(hourly) or 'nothing fits'}"
    print(said)
    if options.out:
        _write(Path(options.out), said + "\n", rows, drawn)
    return 0


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 5e7 else f"{parameters:,}"


def _lengths(options: SimulateOptions) -> tuple[list[int], str, Relatives | None]:
    """Of the samples, where they are from, and what they share, if that is wanted."""
    if options.lengths in NAMED:
        named = NAMED[options.lengths]
        count = max(_DRAWN, options.gpus * max(options.minibatches))
        lengths = named_lengths(options.lengths, count, seed=options.seed)
        whence = f"like {options.lengths} ({named.source})"
    elif not Path(options.lengths).exists():
        raise ValueError(f"--lengths {options.lengths!r} is neither a file nor one of {', '.join(NAMED)}")
    else:
        lengths, whence = lengths_of_file(options.lengths)
    if options.group is not None:
        lengths, relatives = grouped(lengths, prompt=options.prompt_tokens, group=options.group)
        return lengths, f"{whence}, after prompts of {options.prompt_tokens:,}, each {options.group} times", relatives
    if not options.share_prefixes:
        return lengths, whence, None
    if Path(options.lengths).suffix != ".npz":
        raise ValueError(
            f"--share-prefixes: --lengths {options.lengths} has no tokens to compare: give the .npz of prepared data, "
            f"which train sft writes into OUT/data, or --group and --prompt-tokens"
        )
    return lengths, whence, find_relatives(TokenizedDataset.load(options.lengths).undecoded())


def _write(out: Path, text: str, rows: list[Row], drawn: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_file(out / "table.md", text.encode())
    plain = [
        {
            "samples_per_gpu": row.samples,
            "setting": row.name,
            "step_s": row.outcome.step_s,
            "speedup": row.speedup,
            "idle": row.outcome.idle.tolist(),
            "exposed_share": row.outcome.exposed_share,
            "peak_bytes": row.outcome.peak_bytes,
            "fits": row.fits,
        }
        for row in rows
    ]
    write_file(out / "simulate.json", json.dumps(plain, indent=1, allow_nan=False).encode())
    shown = {row.name: row.outcome.events for row in rows if row.samples == drawn}
    tracks = {name: shown[name] for name in DRAWN}
    save_trace(tracks, out / "trace.json")
    title = f"Simulated: one minibatch of {drawn} samples per GPU; red is waiting"
    save_timeline(tracks, out / "timeline.png", title=title)
    print(f"\nwritten to {out}: table.md, simulate.json, timeline.png, trace.json")
