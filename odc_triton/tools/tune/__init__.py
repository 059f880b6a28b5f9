"""`odc-triton tune`: measures implementations of a model's layers here, and writes the table that they then use.

Imports no torch, so that `--help` is quick.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...base.environment import environment
from ...base.files import write_file
from ...jobs.options.options import REQUIRED, option, plain_paths, require_files, require_one_model, require_writable

if TYPE_CHECKING:
    from torch import nn

    from ...machine.topology import Place
    from ...nn.tuned import Line
    from .trial import Measured, Trial

TIMEOUT = timedelta(minutes=30)
TAKEN = "chosen"


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune."""

    tokens: str = option(REQUIRED, "numbers of tokens per microbatch to measure, such as 512,4096,16384")
    model: str | None = option(None, "a transformers causal LM: local folder or hub id; only its shapes count")
    init: str | None = option(None, "config.json of a model, instead of --model")
    dtype: Literal["fp32", "bf16"] = option("fp32", "dtype of compute")
    operators: str = option(
        "linear,qkv,embedding,log_probs,experts,attention",
        "what to tune, separated by commas; of attention its cost only",
    )
    rounds: int = option(7, "measurements of each way, of which the median counts")
    tiles: int = option(4, "tiles to try for each kernel, best prediction first; on a GPU only")
    backend: Literal["auto", "cpu", "cuda"] = option("auto", "as in fully_shard")
    folder: str | None = option(None, "folder of the tables; by default $ODC_TUNED, or ~/.cache/odc-triton/tuned")

    def __post_init__(self) -> None:
        plain_paths(self, "model", "init", "folder")
        from ...nn.choice import VARIABLE, WORDS
        from ...nn.tuned import default_folder

        require_one_model(self)
        require_files(self, "init", or_folders=True)
        if self.rounds < 1 or self.tiles < 0:
            raise ValueError(f"--rounds is {self.rounds} and --tiles {self.tiles}; give at least 1 and 0")
        if unknown := set(self.wanted) - {*WORDS, "attention"}:
            raise ValueError(f"--operators has {', '.join(sorted(unknown))}; there are {', '.join(WORDS)}, attention")
        if os.environ.get(VARIABLE):
            raise ValueError(f"{VARIABLE} is set and would override the ways to measure: unset it")
        if self.folder is None and default_folder() is None:
            raise ValueError("ODC_TUNED=off: unset it, or give --folder")
        require_writable("the tables' folder" if self.folder is None else "--folder", self.where)
        _ = self.counts

    @property
    def counts(self) -> list[int]:
        """The numbers of tokens, ascending."""
        try:
            counts = sorted({int(part) for part in self.tokens.split(",")})
        except ValueError:
            counts = [0]
        if counts[0] < 1:
            raise ValueError(f"--tokens is {self.tokens!r}; give whole numbers of at least 1, separated by commas")
        return counts

    @property
    def wanted(self) -> list[str]:
        return [part.strip() for part in self.operators.split(",")]

    @property
    def where(self) -> Path:
        from ...nn.tuned import default_folder

        return Path(self.folder) if self.folder is not None else default_folder()


def run_tune(options: TuneOptions) -> str | None:
    """Runs the measurements; every rank of the job calls it. Returns the text to print on rank 0, None on others."""
    import torch

    from ...comm.grid import grid_of
    from ...nn.tuned import OFF, VARIABLE
    from ...plan.decoder import Decoder
    from ...recurrent.layers import recurrent_layers
    from ...sharding.agree import default_mesh, watched_barrier
    from ...sharding.backend import backend_of
    from .attention import measure_attention, measure_rule
    from .trial import Trial
    from .workload import workloads_of

    mesh = default_mesh(TIMEOUT, options.backend)
    if mesh.ndim > 1:
        raise ValueError(f"{mesh.size()} ranks are on {mesh.size(0)} hosts: tune on one host, as replicas run alike")
    backend = backend_of(options.backend, mesh)
    with watched_barrier(grid_of(mesh), TIMEOUT) as barrier:
        messages = barrier.exchange("tune: the ranks' devices", {"device": backend.device_id()})
    place = backend.place([theirs["device"] for theirs in messages])
    model = _shapes(options)
    every = workloads_of(model)
    counts = {w: n for w, n in every.items() if w.operator in options.wanted}
    if not counts and "attention" not in options.wanted:
        raise ValueError(f"the model has no layers for {options.operators}: replace_layers finds none")
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    lines, rows = [], []
    for number, (workload, layers) in enumerate(counts.items(), start=1):
        if mesh.get_rank() == 0:
            plural = "s" if layers > 1 else ""
            print(f"[{number} of {len(counts)}] measuring {workload.name} ({layers} layer{plural})", flush=True)
        with environment(**{VARIABLE: OFF}):  # `fully_shard` reads no table, so every candidate finds whole weights
            trial = Trial(workload, mesh=mesh, dtype=dtype, backend=options.backend, timeout=TIMEOUT)
        found, report = _tune(trial, options, place)
        lines += found
        rows += [[workload.name, str(layers), *row] for row in report]
    attention: dict[str, float] = {}
    if "attention" in options.wanted and any(each.operator in ("linear", "qkv") for each in every):
        decoder = Decoder.of(model.config.get_text_config())
        about = {"rounds": options.rounds, "dtype": dtype, "device": torch.device(backend.mesh_device)}
        name = str(dtype).removeprefix("torch.")
        attention[f"{name}: {decoder.words}"] = measure_attention(decoder, every, counts=options.counts, **about)
        if decoder.recurrent is not None and decoder.recurrent.heads:
            module = recurrent_layers(model)[0]
            found = measure_rule(decoder.recurrent, module, every, counts=options.counts, **about)
            attention[f"{name}: {decoder.rule_words}"] = found
    if mesh.get_rank() != 0:
        return None
    report = _report(rows, save(place, lines, options.where, attention), place, options)
    costs = [
        f"Per FLOP {name} takes {each:.2f} times as long as linear layers in {options.dtype}: train sft and train grpo "
        f"balance by it; in your loop pass CostModel.from_config(config, {name}={each:.2f})"
        for name, each in zip(("attention", "rule"), attention.values(), strict=False)
    ]
    return "\n".join([report, *costs])


def save(place: Place, lines: list[Line], folder: Path, attention: dict[str, float] | None = None) -> Path:
    """Writes the table of this place; keeps its lines for other shapes and dtypes, and `attention` of other models."""
    from ...nn.tuned import FORMAT, load, versions

    folder.mkdir(parents=True, exist_ok=True)
    table = load(place, folder)
    new = {(line.operator, line.shape, line.dtype) for line in lines}
    kept = [line for line in table.lines if (line.operator, line.shape, line.dtype) not in new]
    content = {
        "format": FORMAT,
        "place": asdict(place),
        "versions": versions(),
        "lines": [_write_line(line) for line in [*kept, *lines]],
        "attention": table.attention | (attention or {}),
    }
    path = folder / place.file_name
    write_file(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def _write_line(line: Line) -> dict[str, Any]:
    tiles = [
        {"kernel": kernel, "kind": type(tile).__name__, "sizes": asdict(tile)} for kernel, tile in line.choice.tiles
    ]
    return vars(line) | {"choice": line.choice.words, "tiles": tiles}


def _shapes(options: TuneOptions) -> nn.Module:
    """The model on the meta device, its layers replaced by ours."""
    from ...checkpoint import meta_causal_lm
    from ...nn.replace import DEFAULT_ROLES, HEAD, replace_layers

    model = meta_causal_lm(init=options.model or options.init)  # its weights are not read
    replace_layers(model, roles=[*DEFAULT_ROLES, HEAD], verbose=False)
    return model


def _tune(trial: Trial, options: TuneOptions, place: Place) -> tuple[list[Line], list[list[str]]]:
    """The table's lines for one workload, and rows to print (tokens, candidate, milliseconds, speed, verdict)."""
    from ...nn.tuned import Line
    from ...sharding.backend import BACKENDS
    from .candidates import MARGIN, decide, shipped, ways

    workload, device = trial.workload, trial.engine.heap.device.type
    kernels = BACKENDS[place.backend].adds_by_kernel
    pull_s = trial.pull_s(rounds=options.rounds)
    measured: dict[int, Measured] = {}
    refused: list[list[str]] = []
    for tokens in options.counts:
        heap = trial.engine.heap
        shared = device == "cuda" and len(heap.near) > 1
        candidates = ways(workload, tokens, device=device, apart=heap.apart, kernels=kernels, shared=shared)
        if len(candidates) == 1:
            return [], [[str(tokens), next(iter(candidates)), "", "", "the only way here: not measured"]]
        found = trial.measure(candidates, tokens=tokens, rounds=options.rounds)
        if not (of := found.rounds):  # none fits into memory, or works: what fewer tokens, or other layers, got counts
            refused = [[str(tokens), way, "-", "", why] for way, why in found.refused.items()]
            break
        measured[tokens] = found
        for words in of:
            if "/gathered/" in words:  # pulled twice, while the unit before computes: only the excess costs time
                of[words] = [max(seconds, 2 * pull_s) for seconds in of[words]]
    if not measured:
        return [], refused
    defaults = {tokens: shipped(workload, tokens, device=device).words for tokens in measured}
    alike = workload.operator in ("qkv", "experts")  # with it experts are all gathered, or never
    chosen = decide({t: m.rounds for t, m in measured.items()}, defaults, one_backend=alike)
    lines, rows = [], []
    for tokens, words in chosen.items():
        best = _with_tiles(trial, words, tokens, options, measured[tokens])
        medians = {way: statistics.median(rounds) for way, rounds in measured[tokens].rounds.items()}
        line = {"operator": workload.operator, "dtype": str(trial.dtype).removeprefix("torch."), "choice": best}
        line |= {"tokens": None if tokens == max(measured) else tokens * workload.top_k, "seconds": medians}
        lines += [Line(shape=shape, **line) for shape in workload.shapes]
        usual_s = medians.get(defaults[tokens])
        for way, seconds in medians.items():
            notes = [note for note, holds in (("default", way == defaults[tokens]), (TAKEN, way == words)) if holds]
            if not notes and words == defaults[tokens] and usual_s and seconds <= usual_s * (1 - MARGIN):
                notes = ["not clearly: try more --rounds"] * (not alike)
            speed = f"{usual_s / seconds:.2f}x" if usual_s else ""
            rows.append([str(tokens), way, f"{seconds * 1e3:.3f}", speed, ", ".join(notes)])
        rows += [[str(tokens), way, "-", "", why] for way, why in measured[tokens].refused.items()]
        rows += [[str(tokens), kernel, "", "", f"tile {tile}"] for kernel, tile in best.tiles]
    return lines, rows + refused


def _with_tiles(trial: Trial, words: str, tokens: int, options: TuneOptions, measured: Measured) -> Any:
    """The choice, with other tiles for its kernels if they are faster; adds to `measured`."""
    import torch

    from ...nn.choice import as_choice
    from .candidates import decide, tiles

    choice = as_choice(words)
    if not torch.cuda.is_available() or not options.tiles:
        return choice
    major, minor = torch.cuda.get_device_capability()
    about = {"world": trial.engine.world, "element_bytes": trial.dtype.itemsize, "arch": major * 10 + minor}
    about["device"] = torch.cuda.get_device_name()
    by_kernel: dict[str, dict[str, Any]] = {}
    for kernel, name, other in tiles(choice, trial.workload, tokens=tokens, most=options.tiles, **about):
        by_kernel.setdefault(kernel, {})[name] = other
    for others in by_kernel.values():
        found = trial.measure({words: choice} | others, tokens=tokens, rounds=options.rounds)
        measured.rounds |= {name: rounds for name, rounds in found.rounds.items() if name != words}
        best = decide({tokens: found.rounds}, {tokens: words})[tokens]
        if best != words:
            choice = replace(choice, tiles=(*choice.tiles, *others[best].tiles))
    return choice


def _report(rows: list[list[str]], path: Path, place: Place, options: TuneOptions) -> str:
    from ...jobs.reports.report import table
    from .candidates import MARGIN, ROUNDS_WON

    changed, kept = (sum(row[-1] == note for row in rows) for note in (TAKEN, f"default, {TAKEN}"))
    ranks = f"{place.ranks} rank{'s' * (place.ranks > 1)}"
    first = f"set ODC_TUNED={options.folder}" if options.folder else "nothing"
    return (
        f"Forward and backward on {ranks} with {place.processor}, {place.topology}: median of {options.rounds} rounds, "
        f"and the speed in the default's\n\n"
        f"{table(rows, ('operator', 'layers', 'tokens', 'way', 'ms', 'speed', ''))}\n"
        f"A way: plain torch (eager) or our kernels (triton) / where weights are read / how gradients are added; "
        f"docs/layers.md\n\n"
        f"{changed} of {changed + kept} choices are clearly faster than the default: by {MARGIN:.0%}, and in "
        f"{ROUNDS_WON:.0%} of the rounds; the others stay. They are in {path}\n"
        f"What you have to do: {first}. Runs here on {ranks} with --replace-layers or --fused-head (in your loop: "
        f"replace_layers) then use them; ODC_TUNED=off turns them off"
    )
