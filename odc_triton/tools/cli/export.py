"""Writes a run's checkpoint into a folder for plain transformers, or for plain PEFT if the run trained adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ...base.errors import OdcError
from ...base.files import require_new_folder, require_source
from ...jobs.options.config_file import written_options
from ...jobs.options.options import REQUIRED, expanded, option, plain_paths, require_one_model


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Export."""

    out: str = option(REQUIRED, "folder to create")
    model: str | None = option(None, "the model that was trained: local folder or hub id; by default the run's")
    init: str | None = option(None, "config.json of the model, if training began with random weights")
    tokenizer: str | None = option(None, "folder, hub id or tokenizer.json; by default the run's, or --model's")
    dtype: Literal["fp32", "bf16"] | None = option(None, "dtype of the weights that are written; by default the run's")
    merge: bool = option(False, "for a run with --lora-rank: the whole model, with its adapters added to it")

    push_to_hub: str | None = option(None, "push the folder to the Hugging Face hub, as OWNER/NAME")
    hub_private: bool = option(False, "create it as a private one; by default as the owner's settings say")

    def __post_init__(self) -> None:
        plain_paths(self, "out", "model", "init", "tokenizer")
        if self.model is not None or self.init is not None:
            require_one_model(self)


def export(checkpoint: str | Path, options: ExportOptions) -> Path:
    """Writes `checkpoint`, or the newest one in this folder, into `options.out`; returns the one written.

    For a run with `--lora-rank` it writes the adapters, as the run does at its end, or with `merge` the whole
    model for plain transformers. One process reads it, for any number of ranks that wrote it. Model and tokenizer
    are those in the run's run.yaml, unless `options` name a model.

    Raises as `load_checkpoint` and `save_pretrained`, ValueError for `merge` of a run without adapters and if
    the model is unknown, and FileNotFoundError if there is no checkpoint, or a file in run.yaml is missing.
    """
    from ...jobs.checkpoints.steps import newest_in
    from ...jobs.train.push import require_hub

    require_new_folder(options.out)  # before work that takes minutes
    if options.push_to_hub is not None:
        require_hub(options.push_to_hub)
    path = Path(expanded(checkpoint))
    if (path / ".metadata").exists():
        return _export(path, options)
    while (found := newest_in(path) or newest_in(path / "checkpoints")) is not None:
        try:
            found = _best_or(found)
            return _export(found, options)
        except (OSError, OdcError):
            if found.exists():
                raise
        print(f"the run has removed {found} meanwhile: reading the next one", flush=True)
    models = [f"; its model is in {path / name}" for name in ("model", "adapter") if (path / name).is_dir()]
    raise FileNotFoundError(
        f"{path} is neither a checkpoint (step-…), nor a folder of them, nor a run's folder with any{''.join(models)}"
    )


def _best_or(newest: Path) -> Path:
    """The checkpoint of the best evaluation if the run has --keep-best and one is there, else the newest one."""
    from ...checkpoint.folder import read_state

    state = read_state(newest)
    step = state.get("identity", {}).get("keep_best") and state["state"]["best_step"]
    best = newest.with_name(f"step-{step or 0:08d}")
    return best if step and best.is_dir() else newest


def _export(path: Path, options: ExportOptions) -> Path:
    import torch

    from ...checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained
    from ...checkpoint.base_model import FILE
    from ...checkpoint.folder import load_checkpoint, read_state
    from ...checkpoint.pretrained import expect_weights
    from ...jobs.train.metrics import read_metrics
    from ...jobs.train.model import adapters_of, add_adapters, name_special_tokens, quantise, ties_head
    from ...jobs.train.model_card import write_card
    from ...sharding.shard_module import fully_shard

    if path.resolve() in Path(options.out).resolve().parents:
        raise ValueError(f"--out is {options.out}, inside of the checkpoint {path}: give a folder elsewhere")
    options = _with_model(options, path)
    tokenizer = _tokenizer(options)
    if tokenizer is None:
        print(f"{options.out} gets no tokenizer: give --tokenizer to have one in it")
    state = read_state(path)
    run = state.get("identity", {})
    if tokenizer is not None and (template := run.get("contents", {}).get("chat_template")):
        tokenizer.chat_template = template
    torch.manual_seed(state.get("seed", 0))  # older checkpoints have a digest of what a run draws below its adapters
    model = meta_causal_lm(model=options.model, init=options.init, scores=run.get("job") == "reward")
    if tokenizer is not None:
        name_special_tokens(model, tokenizer)
    if state.get("ties_head", ties_head(model)) != ties_head(model):
        raise ValueError(
            f"the head is {'' if state['ties_head'] else 'not '}tied to the embedding in {path}, and in the model here "
            f"it is the other way round: give --model the folder that training began with, as it was"
        )
    rank = run.get("lora_rank")
    if options.merge and not rank:
        raise ValueError(f"--merge: {path} is not of a run with --lora-rank, so it has no adapters: leave it out")
    if run.get("quantize"):
        quantise(model, run["quantize"], run["dtype"])
    if rank:
        model = add_adapters(model, **adapters_of(run))
    source = options.model if (path / FILE).exists() else None
    if source is not None:
        expect_weights(model)
    model = fully_shard(model)
    if source is not None:
        load_pretrained_shards(model, source)
    load_checkpoint(path, model=model, optimizer=None)
    if rank and not options.merge and options.model is None:
        print(f"{options.out} gets adapters of a random base, which is in no other folder: --merge adds them to it")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype or run.get("dtype", "fp32")]
    source = options.tokenizer or options.model
    save_pretrained(model, options.out, tokenizer, processor=source, dtype=dtype, merge=options.merge)
    if "data" in run:  # else it is no checkpoint of a run
        steps = read_metrics(path.absolute().parent.parent / "metrics.jsonl")
        write_card(options.out, run, [line for line in steps if line["step"] <= state["state"]["step"]])
    if run.get("chat_template"):
        (Path(options.out) / "chat_template.json").unlink(missing_ok=True)
    return path


def _with_model(options: ExportOptions, checkpoint: Path) -> ExportOptions:
    """With the run's model and tokenizer, if `options` name no model. Paths are as in the run's options."""
    if options.model is not None or options.init is not None:
        return options
    from ...jobs.train.prepare import CONFIG

    config = checkpoint.absolute().parent.parent / CONFIG
    run = written_options(config) if config.exists() else {}
    names = ["model", "init"] if options.tokenizer else ["model", "init", "tokenizer"]
    found = {name: run[name] for name in names if isinstance(run.get(name), str)}
    if ("model" in found) == ("init" in found):
        raise ValueError(f"give either --model or --init (a config.json): there is no {config} that names the model")
    for source in found.values():
        try:
            require_source(source)
        except FileNotFoundError as error:
            remedy = "run this where the run was started, or give --model or --init, and --tokenizer"
            raise FileNotFoundError(f"{error}; {config} names it: {remedy}") from None
    return replace(options, **found)


def _tokenizer(options: ExportOptions) -> Any:
    """None for random weights and no --tokenizer."""
    from ...jobs.data.tokenizer import read_tokenizer

    if options.tokenizer is not None:
        return read_tokenizer(options.tokenizer)
    if options.model is None:
        return None
    try:
        return read_tokenizer(options.model)
    except (OSError, ValueError):
        return None  # the model's folder has none
