"""Features of training together, on ranks: by the job of `train sft`, and by a loop on torch's own fully_shard."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from bench.whole import whole as whole_tensor
from odc_triton import enable_split, minibatch, replace_layers, use_odc
from odc_triton.balance import MinibatchSampler, PackedDataset, pack_collate, store_counter
from odc_triton.checkpoint.folder import Saving
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.jobs.checkpoints.background import BackgroundCheckpoints
from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.jobs.data.dataset import DataOptions, TokenizedDataset
from odc_triton.jobs.data.tokenizer import TextEncoder, load_tokenizer
from odc_triton.jobs.train import job, sft
from odc_triton.jobs.train.job import load_frozen, train
from odc_triton.jobs.train.model import precision
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.nn import Linear, LMHead
from odc_triton.optim import Muon
from odc_triton.recurrent.layers import recurrent_layers
from tests.support.deadlines import LONG_S
from tests.support.hybrids import CONFIGS
from tests.support.replicas import mesh_of
from tests.support.sft_case import case, write_case
from tests.support.table_composes import CAP, FEATURES, Pair
from tests.support.tokenized import tokenize_file

STEPS, PER_STEP, SAVED = 3, 8, 2  # steps, samples of a step, and the step with a checkpoint in the background
Weights = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class Trained:
    """`losses` and `norms` of each step; whole parameters before the first step, after step SAVED, in the checkpoint
    of that step, and after the last; `seen`: the features that were at work.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    start: Weights = field(default_factory=dict)
    middle: Weights = field(default_factory=dict)
    saved: Weights = field(default_factory=dict)
    end: Weights = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)

    def moved(self) -> torch.Tensor:
        """How all parameters changed, in one vector."""
        return torch.cat([(self.end[name] - self.start[name]).flatten() for name in sorted(self.end)])


def write(folder: Path) -> Path:
    """Data, a tokenizer, and a small Qwen2, whose heads have 16 elements; "hybrid" is a Qwen3.5."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for name, config in {"base": {}, "hybrid": CONFIGS["qwen3_5"]}.items():
        write_case(folder, config={"hidden_size": 64} | config)
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder / "config.json")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # large enough for attention and biases to matter
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder / name)
    return folder


def model_of(folder: Path, features: tuple[str, ...]) -> Path:
    return folder / ("hybrid" if "hybrid" in features else "base")


def options_of(folder: Path, features: tuple[str, ...], *, world: int, out: Path) -> SftOptions:
    wanted = {"init": None, "model": str(model_of(folder, features)), "out": str(out)}
    wanted |= {"truncate": False, "token_cap": CAP}
    wanted |= {"steps": STEPS, "samples_per_rank": PER_STEP // world, "warmup_steps": 0, "schedule": "constant"}
    for feature in features:
        wanted |= FEATURES[feature].options
    return case(folder, **wanted)


def samples_of(folder: Path) -> TokenizedDataset:
    encoder = TextEncoder.of(load_tokenizer(folder / "tokenizer.json"))
    return tokenize_file(folder / "data.jsonl", encoder, DataOptions(max_tokens=CAP, too_long="error"))


def whole(model: nn.Module) -> Weights:
    return {name: whole_tensor(parameter) for name, parameter in model.named_parameters()}


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


def _noting(found: Trained, feature: str, function: Callable) -> Callable:
    def noted(*args: Any, **kwargs: Any) -> Any:
        found.seen.add(feature)
        return function(*args, **kwargs)

    return noted


def _watch_model(model: nn.Module, found: Trained, features: tuple[str, ...]) -> None:
    """Compiles the blocks if that is wanted; notes what is in the model, and what its forwards call."""
    found.start = whole(model)
    if {Linear, LMHead} <= {type(module) for module in model.modules()}:
        found.seen.add("replaced layers")
    if recurrent_layers(model):
        found.seen.add("hybrid")
    if all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad):
        found.seen.add("LoRA")
    for module in model.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            recompute = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = _noting(found, "checkpointing", recompute)

    def note_dtype(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        if output.dtype == torch.bfloat16:
            found.seen.add("bf16")

    model.get_input_embeddings().register_forward_hook(note_dtype)
    if "compile" in features:
        _compile_blocks(model, found)


def _compile_blocks(model: nn.Module, found: Trained) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()

    def compiler(graph: Any, inputs: Any) -> Callable:
        return _noting(found, "compile", aot_eager(graph, inputs))

    for block in blocks_of(model):
        block.compile(backend=compiler, dynamic=True)


def _watch_run(run: Any, found: Trained, went_on: threading.Event) -> None:
    """`went_on`: set after the step that follows step SAVED."""
    step = run.train_step

    def noted_step() -> Any:
        metrics = step()
        found.losses.append(metrics["loss"])
        found.norms.append(metrics["grad_norm"])
        if metrics["step"] == SAVED:
            found.middle = whole(run.model)
        elif metrics["step"] > SAVED:
            went_on.set()
        return metrics

    def noted_packs(given: Any) -> Any:
        if given.split is not None:
            found.seen.add("split")
        return given

    run.train_step, run._minibatches = noted_step, map(noted_packs, run._minibatches)
    steppers = getattr(run.optimizer, "optimizers", [run.optimizer])
    marks = {
        "Muon": any(isinstance(each, Muon) for each in steppers),
        "exact": run.engine.deterministic,
        "replicas": run.engine.replicas.count == 2,
        "queue": run.sampler.balance == "queue",
        "one base": run.engine.base is not None,
    }
    found.seen |= {name for name, is_on in marks.items() if is_on}


def _by_job(rank: int, world: int, folder: Path, features: tuple[str, ...], out: Path) -> Trained:
    """A run of `train sft`. Only compiling is no option of it."""
    found, runs, went_on = Trained(), [], threading.Event()
    save, write = _noting(found, "background checkpoints", BackgroundCheckpoints.save), Saving.write

    def start(options: SftOptions, sharded: Callable, prepared: Any) -> Any:
        def watched(options: SftOptions) -> Any:
            base = load_frozen(options, sharded) if "one base" in features else None
            model, cost = sharded(options, **({} if base is None else {"base_of": lambda _: base}))
            _watch_model(model, found, features)
            return model, cost

        runs.append(sft._start(options, watched, prepared))
        _watch_run(runs[0], found, went_on)
        return runs[0]

    def write_late(*args: Any) -> Any:
        assert went_on.wait(LONG_S), f"no step followed step {SAVED}"
        return write(*args)

    with (
        mock.patch.object(BackgroundCheckpoints, "save", lambda *args, **kwargs: save(*args, **kwargs)),
        mock.patch.object(Saving, "write", write_late),
    ):
        train(options_of(folder, features, world=world, out=out), sft.prepare, start, None)
    (run,) = runs
    found.end = whole(run.model)
    if run.options.checkpoint_every:
        checkpoints = Checkpoints(out / "checkpoints", keep=2)
        checkpoints.load(checkpoints.path_of(SAVED), model=run.model, optimizer=run.optimizer)
        found.saved = whole(run.model)
    return found


def _by_bridge(rank: int, world: int, folder: Path, features: tuple[str, ...], out: Path) -> Trained:
    """The same steps under `use_odc`."""
    found, options, data = Trained(), options_of(folder, features, world=world, out=out), samples_of(folder)
    torch.use_deterministic_algorithms(options.exact)
    try:
        model = _bridged(folder, features, options, out)
        _watch_model(model, found, features)
        found.seen.add("bridge")
        if options.replicas and next(model.parameters()).device_mesh.ndim == 2:
            found.seen.add("replicas")
        _steps(model, options, data, rank, world, found)
    finally:
        torch.use_deterministic_algorithms(False)
    for module in [*blocks_of(model), model]:
        module.reshard()
    found.end = whole(model)
    return found


def _bridged(folder: Path, features: tuple[str, ...], options: SftOptions, out: Path) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    from tests.support.composed_plain import plain_model

    model = plain_model(folder, features)
    enable_packing(model)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.replace_layers:
        replace_layers(model, roles=["attention", "embedding", "linear", "head"], verbose=False)
    world = torch.distributed.get_world_size()
    how: dict[str, Any] = {"mesh": mesh_of((2, world // 2) if options.replicas else (world,))}
    if options.dtype == "bf16":
        how["mp_policy"] = precision(options.dtype)
    for block in blocks_of(model):
        fully_shard(block, **how)
    use_odc(fully_shard(model, **how))
    if "one base" in features:
        job.fully_shard(plain_model(folder, features), base=model)
    if options.split_sequences:
        enable_split(model, tokens=CAP)
    if options.checkpoint_every:
        BackgroundCheckpoints(Checkpoints(out, keep=2), model=model)
    return model


def _steps(
    model: nn.Module, options: SftOptions, data: TokenizedDataset, rank: int, world: int, found: Trained
) -> None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, weight_decay=options.weight_decay)
    if options.optimizer == "muon":
        optimizer = Muon([parameter for parameter in trained if parameter.ndim == 2], lr=options.lr)
    queued = options.balance == "queue"
    sampler = MinibatchSampler(
        data.lengths.tolist(),
        options.samples_per_rank,
        options.token_cap,
        balance=options.balance,
        rank=rank,
        world=world,
        drop_last=True,
        counter=store_counter() if queued else None,
    )
    for _, dealt in zip(range(STEPS), sampler, strict=False):
        own = dealt.own_part() if queued else [sample for pack in dealt for sample in pack]
        found.seen |= {"queue"} if queued else set()
        total = torch.zeros(())
        with minibatch(model, tokens=int(data.target_counts[own].sum())) as mb:
            for members in dealt:
                (pack,) = pack_collate([PackedDataset(data)[members]])
                loss = summed_loss(model, pack) / mb.tokens
                loss.backward()
                total += loss.detach()
        torch.distributed.all_reduce(total)
        found.losses.append(total.item())
        found.norms.append(whole_tensor(nn.utils.clip_grad_norm_(trained, options.clip_norm)).item())
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(rank: int, world: int, folder: Path, pairs: list[Pair], out: Path) -> dict[Pair, Trained | str]:
    """What was trained, by pair, or what was raised."""
    sys.modules["matplotlib"] = None  # reports without images are quicker
    found: dict[Pair, Trained | str] = {}
    for pair in pairs:
        how = _by_bridge if "bridge" in pair else _by_job
        try:
            found[pair] = how(rank, world, folder, pair, out / "-".join(pair))
        except Exception as error:
            found[pair] = f"{type(error).__name__}: {error}"
        gc.collect()
    return found
