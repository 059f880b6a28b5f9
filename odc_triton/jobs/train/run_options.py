"""Options that every training job has. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

import math
import os
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

from ...base.files import fingerprint
from ...checkpoint.adapted import base_of
from ..data.templates import TEMPLATES, read_template
from ..options.options import (
    REQUIRED,
    columns_of,
    flag,
    option,
    plain_paths,
    require_one_model,
    require_seed,
    require_token_cap,
)

PATHS = ("model", "init", "teacher", "chat_template")  # compared by what is there
Options = TypeVar("Options", bound="RunOptions")
_YEAR_MINUTES = 365 * 24 * 60
TrackerName = Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab", "all", "none"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A training run."""

    data: tuple[str, ...] = option(REQUIRED, "what to train on; repeatable")
    data_weight: tuple[float, ...] = option(
        (), "how often an epoch takes each sample of a --data; one for each --data, in order; 1 by default"
    )
    map: tuple[str, ...] = option(
        (),
        "NAME=COLUMN: what a column of the data is called here, as in prompt=question,completion=answer; repeatable",
    )
    out: str = option(REQUIRED, "folder for metrics, checkpoints, report and the trained model")
    model: str | None = option(None, "a transformers causal LM: local folder or hub id; this or --init is required")
    init: str | None = option(None, "config.json of a model to start with random weights, instead of --model")
    tokenizer: str | None = option(None, "folder, hub id or tokenizer.json; by default the model's")
    chat_template: str | None = option(
        None, f"jinja file, or one of {', '.join(TEMPLATES)}, in place of the tokenizer's own chat template"
    )

    steps: int | None = option(None, "optimizer steps", group="Steps")
    token_cap: int = option(4096, "most tokens in one pack, which is one microbatch; sets the memory needed")
    split_sequences: bool = option(False, "split long samples over a replica's ranks: for few long samples per rank")
    split_tokens: int = option(0, "tokens per rank that others may read; 0: about 0.4 of the longest sample")
    split_cuts: int = option(
        0, "hybrids: places per rank after which other ranks go on, each keeps a state; 0: 8, or as many as needed"
    )
    replicas: int | None = option(None, "copies of the model, each on ranks of one host; by default one per host")
    seed: int = option(0, "seed for the order of the data, dropout and random weights")
    timeout_minutes: float = option(30.0, "minutes to wait for a rank that is alive; a dead one is named in seconds")

    optimizer: Literal["adamw", "adamw-8bit", "sgd", "muon"] = option(
        "adamw",
        "adamw-8bit: states of 2 bytes per element, not 8 (needs bitsandbytes); sgd: without momentum; "
        "muon: for the blocks' matrices, AdamW for the rest",
        group="Optimizer",
    )
    lr: float = option(1e-5, "peak learning rate; Muon's is scaled to match AdamW's")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = option(
        "cosine", "of the learning rate, after a linear warm-up; wsd: constant, and in the last tenth decay by a cosine"
    )
    warmup_steps: int = option(10, "steps of linear warm-up")
    lr_floor: float = option(0.1, "final learning rate of cosine and wsd, as a fraction of the peak; linear ends at 0")
    weight_decay: float = option(0.0, "the optimizer's weight decay")
    clip_norm: float = option(1.0, "largest norm of the gradient, all parameters together; a larger one is scaled down")
    max_skipped: int = option(10, "steps that may be skipped because loss or gradient is not finite; more are an error")

    lora_rank: int = option(
        0, "train only low-rank adapters, with this r (needs peft); 0: the whole model", group="What is computed"
    )
    lora_alpha: float | None = option(None, "adapters are scaled by alpha / rank; by default twice the rank")
    lora_targets: str = option("all-linear", "layers that get adapters: names separated by commas")
    quantize: Literal["nf4", "int8"] | None = option(
        None, "pack the frozen base's linear layers in 4 or 8 bits, as bitsandbytes does; needs --lora-rank"
    )
    freeze_vision_tower: bool = option(
        False, "of a model that sees images train only the projector and the text; no adapters in the tower"
    )
    dtype: Literal["fp32", "bf16"] | None = option(
        None, "dtype of compute; masters and sums of gradients are fp32; by default bf16 on GPUs, fp32 on CPUs"
    )
    exact: bool = option(False, "sum gradients exactly: every run with the same ranks and packs has the same bits")
    gradient_checkpointing: bool | None = option(
        None,
        "recompute activations in backward: less memory, more time; by default on GPUs, if those of a pack would take "
        "more than a quarter of the memory",
    )
    offload_activations: bool = option(
        False,
        "move the activations that --gradient-checkpointing keeps to host memory until backward; no files are written",
        once="offload_checkpoints",
    )
    compile: bool = option(False, "compile the model's blocks by torch.compile, once for packs of any length")
    replace_layers: bool = option(False, "attention, embedding, expert and linear layers read from and add to owners")
    expert_cache: int = option(
        0, "bytes on each GPU for other ranks' experts, each copied once a minibatch; needs --replace-layers"
    )
    fused_head: bool | None = option(
        None,
        "never compute full logits: less memory, a little more time; by default with --split-sequences and "
        "--teacher, for a head that can be fused",
    )

    teacher: str | None = option(
        None,
        "a transformers causal LM with the same tokens: local folder or hub id; the model learns its distributions, "
        "which are never stored",
        group="Distillation",
    )
    teacher_beta: float = option(
        0.5, "the divergence. 0: KL(teacher || model); 1: KL(model || teacher); between them: Jensen-Shannon"
    )
    teacher_temperature: float = option(1.0, "what both models' logits are divided by in the divergence")
    teacher_weight: float = option(1.0, "of the divergence in the loss; the rest, 1 - WEIGHT, is the job's own loss")

    eval_data: str | None = option(None, "what to evaluate on, in the same forms as --data", group="Evaluation")
    eval_every: int = option(0, "steps between evaluations; the run always ends with one. 0: only that one")
    early_stopping: int = option(
        0, "evaluations in a row without a better eval_loss, of grpo eval_reward, after which the run ends; 0: off"
    )
    keep_best: bool = option(
        False, "write the model of the best evaluation at the end, and never remove its checkpoint before that"
    )

    checkpoint_minutes: float | None = option(
        None,
        "most minutes of training that a killed run loses: saves that often, when the run is stopped, and at its end; "
        "0: off; by default 10, or off with --checkpoint-every",
        group="Checkpoints",
    )
    checkpoint_every: int = option(0, "steps between checkpoints; 0: by the clock alone")
    checkpoint_background: bool | None = option(
        None,
        "go on training while the files of a checkpoint are written; takes host memory for a copy of masters and "
        "optimizer states; by default on GPUs",
    )
    keep: int = option(2, "how many of the newest checkpoints to keep")
    resume: str = option(
        "never",
        "never, auto (continue the run in --out, if there is one), or a checkpoint: of another run it "
        "starts a branch in a new --out",
    )

    report_to: tuple[TrackerName, ...] = option(
        (),
        "log each step's metrics to a tracker; repeatable; all: each that is installed; none: also overrides a YAML",
        group="Watching the run",
    )
    run_name: str | None = option(None, "the run's name in the tracker; by default that of the folder --out")
    run_group: str | None = option(
        None, "the run's group in wandb, trackio, swanlab, and a tag in mlflow; of a sweep's runs the folder of all"
    )
    project: str | None = option(
        None, "project (in mlflow: experiment); by default WANDB_PROJECT or the like, or odc-triton"
    )

    push_to_hub: str | None = option(
        None,
        "at the end push the model to the Hugging Face hub, as OWNER/NAME; a run that has ended too",
        group="Sharing",
    )
    hub_private: bool = option(False, "create it as a private one; by default as the owner's settings say")

    # These don't affect the result, so a resumed run may change them.
    free: ClassVar[frozenset[str]] = frozenset(
        (
            *("out", "resume", "checkpoint_minutes", "checkpoint_every", "checkpoint_background", "keep"),
            *("timeout_minutes", "max_skipped", "eval_every", "replicas"),
            *("gradient_checkpointing", "offload_activations", "fused_head", "expert_cache", "compile"),
            *("split_sequences", "split_tokens", "split_cuts", "report_to", "run_name"),
            *("run_group", "project", "push_to_hub", "hub_private"),
        )
    )
    # These affect only the steps to come: a resumed run may change them, and says so.
    adjustable: ClassVar[frozenset[str]] = frozenset(
        (
            *("steps", "lr", "schedule", "warmup_steps", "lr_floor", "weight_decay", "clip_norm"),
            *("teacher_beta", "teacher_temperature", "teacher_weight", "early_stopping", "keep_best"),
        )
    )
    # Numbers, which may also be 0 if they are not negative. And `per_rank`.
    positive: ClassVar[tuple[str, ...]] = (
        *("steps", "lr", "clip_norm", "timeout_minutes", "lora_alpha", "keep", "replicas"),
        *("teacher_temperature", "teacher_weight"),
    )
    not_negative: ClassVar[tuple[str, ...]] = (
        *("warmup_steps", "weight_decay", "checkpoint_every", "checkpoint_minutes", "expert_cache"),
        *("eval_every", "early_stopping", "max_skipped", "lora_rank", "split_tokens", "split_cuts"),
    )
    # Only one of each may be set.
    alternatives: ClassVar[tuple[tuple[str, str], ...]] = (("model", "init"),)
    hidden: ClassVar[frozenset[str]] = frozenset()  # not in --help, as they are refused
    job: ClassVar[str]  # the word after `odc-triton train`
    per_rank: ClassVar[str]  # the option that one step takes of on each rank, on average
    shortens: ClassVar[str]  # the options that do so to long samples

    def __post_init__(self) -> None:
        plain_paths(self, "data", "eval_data", "out", "resume", "tokenizer", *PATHS)
        for name in ("data", "report_to"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
        object.__setattr__(self, "map", tuple(sorted(f"{name}={old}" for name, old in columns_of(self.map).items())))
        if self.chat_template is not None:
            read_template(self.chat_template)
        require_one_model(self)
        for name in (*self.positive, self.per_rank, *self.not_negative):
            value, may_be_0 = getattr(self, name), name in self.not_negative
            if value is not None and not (0 < value < math.inf or (may_be_0 and value == 0)):
                wanted = "at least 0" if may_be_0 else "positive"
                raise ValueError(f"{flag(name)} is {value}; it must be {wanted} and finite")
        if self.timeout_minutes > _YEAR_MINUTES:
            raise ValueError(f"--timeout-minutes is {self.timeout_minutes:g}; give at most {_YEAR_MINUTES}, a year")
        require_token_cap(self)
        require_seed(self)
        for name in ("lr_floor", "teacher_beta", "teacher_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{flag(name)} is {getattr(self, name)}; it must be between 0 and 1")
        if self.init is not None and self.tokenizer is None:
            raise ValueError("--init has no tokenizer: give --tokenizer, a folder, a hub id or a tokenizer.json")
        own = [os.path.realpath(os.path.join(self.out, name)) for name in ("model", "adapter")]
        for name in PATHS:
            if (given := getattr(self, name)) is not None and os.path.realpath(given) in own:
                raise ValueError(
                    f"{flag(name)} is {given}, where this run will write its own model: give another --out"
                )
        for name, given in (*(("data", each) for each in self.data), ("eval_data", self.eval_data)):
            if given is not None and Path(given).suffix in (".jsonl", ".json") and not Path(given).exists():
                raise ValueError(f"{flag(name)} is {given}: there is no such file")
        for name in self.report_to:
            if name not in get_args(TrackerName):
                raise ValueError(f"--report-to is {name!r}; give one of {', '.join(get_args(TrackerName))}")
        if "none" in self.report_to:
            if others := [name for name in self.report_to if name != "none"]:
                raise ValueError(f"--report-to is none and {', '.join(others)}: give none alone, or leave it out")
            for name, value in {"report_to": (), "project": None, "run_name": None, "run_group": None}.items():
                object.__setattr__(self, name, value)
        self._check_weights()
        if not self.out:
            raise ValueError("--out is empty; give a folder")
        if not self.resume:
            raise ValueError("--resume is empty; give never, auto or a checkpoint folder")
        self._check_contradictions()

    def _check_weights(self) -> None:
        weights = self.data_weight
        if not self.data:
            raise ValueError("--data is missing: give at least one")
        if weights and len(weights) != len(self.data):
            raise ValueError(
                f"--data-weight is given {len(weights)} times and --data {len(self.data)} times: give one weight for "
                f"each, or none"
            )
        for weight in weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"--data-weight is {weight}; it must be positive and finite")
        if len(self.data) == 1 and weights not in ((), (1.0,)):
            raise ValueError(
                f"--data-weight is {weights[0]}, and a single --data needs none: leave it out, or set --steps"
            )

    def _check_contradictions(self) -> None:
        for one, other in self.alternatives:
            if getattr(self, one) and getattr(self, other):
                raise ValueError(
                    f"{flag(one)} is {getattr(self, one)} and {flag(other)} is {getattr(self, other)}; give one of them"
                )
        needs = {"split_tokens": "split_sequences", "lora_alpha": "lora_rank", "lora_targets": "lora_rank"}
        needs |= {"offload_activations": "gradient_checkpointing", "run_name": "report_to", "project": "report_to"}
        needs |= {"run_group": "report_to", "hub_private": "push_to_hub"}
        needs |= {"expert_cache": "replace_layers", "quantize": "model"}
        needs |= dict.fromkeys(("teacher_beta", "teacher_temperature", "teacher_weight"), "teacher")
        for name, needed in needs.items():
            if getattr(self, name) != self.defaults()[name] and not getattr(self, needed):
                raise ValueError(f"{flag(name)} is {getattr(self, name)}: give {flag(needed)} too, or leave it out")
        data = "--eval-data" + " or --eval-fraction" * hasattr(self, "eval_fraction")
        absent = [data] * (not self.evaluates) + ["--eval-every"] * (not self.eval_every)
        for name in ("early_stopping", "keep_best"):
            if absent and (value := getattr(self, name)):
                raise ValueError(
                    f"{flag(name)} is {value} and compares evaluations: give {' and '.join(absent)}, or leave it out"
                )
        if self.eval_every and not self.evaluates:
            raise ValueError(f"--eval-every is {self.eval_every} and there is nothing to evaluate on: give --eval-data")
        self.require_replicas(self.replicas or 1)

    def on(self: Options, device: str) -> Options:
        """With a dtype, by default that for ranks on `device`, "cuda" or "cpu"."""
        return self if self.dtype else replace(self, dtype="bf16" if device == "cuda" else "fp32")

    def most_tokens(self, ranks: int) -> int:
        """The longest sample: its segments, of `token_cap` tokens at most, may be on all `ranks` of a replica."""
        return self.token_cap * (ranks if self.split_sequences else 1)

    def require_replicas(self, replicas: int, ranks: int | None = None) -> None:
        """Raises ValueError for a number of replicas that does not go with `ranks`, or with other options."""
        said = f"--replicas is {replicas}" if self.replicas else f"there is a replica on each of {replicas} hosts"
        if ranks is not None and ranks % replicas:
            raise ValueError(f"{said} and --ranks is {ranks}: give a number of replicas that divides the ranks")
        if not self.split_sequences or replicas == 1:
            return
        if ranks == replicas:
            raise ValueError(
                f"{said}, of one rank each, and --split-sequences splits samples over the ranks of a replica: give it "
                f"more ranks, or leave --split-sequences out"
            )

    @property
    def architecture(self) -> str:
        """The folder, hub id or config that says what the model is."""
        return self.model or self.init or ""  # one is given

    @property
    def columns(self) -> dict[str, str]:
        """The data's columns that have another name here, by that name."""
        return columns_of(self.map)

    @property
    def model_folder(self) -> Path:
        """Where the run writes its model, or its adapters."""
        return Path(self.out) / ("adapter" if self.lora_rank else "model")

    @property
    def checkpoint_interval_s(self) -> float:
        """Most seconds of training without a checkpoint; 0: any."""
        default = 0.0 if self.checkpoint_every else 10.0
        return 60 * (default if self.checkpoint_minutes is None else self.checkpoint_minutes)

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints without being stopped."""
        return self.checkpoint_every > 0 or self.checkpoint_interval_s > 0

    @property
    def needs_branches(self) -> bool:
        """True if a model must be refused whose samples can't share prefixes."""
        return False

    @property
    def evaluates(self) -> bool:
        return self.eval_data is not None

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """The default values of options."""
        return {each.name: each.default for each in fields(cls) if each.default is not MISSING}

    @classmethod
    def per_step(cls) -> str:
        """The identity's key for the number of samples in one step, of all ranks."""
        return cls.per_rank.replace("_per_rank", "_per_step")

    def identity(self, world: int) -> dict[str, Any]:
        """Options that a run must share with the one that it resumes; JSON."""
        wanted = {name: value for name, value in asdict(self).items() if name not in self.free}
        wanted[self.per_step()] = wanted.pop(self.per_rank) * world
        wanted["contents"] = {name: fingerprint(wanted[name]) for name in PATHS if wanted[name] is not None}
        for name in PATHS:
            if wanted[name] is not None and Path(wanted[name]).is_dir() and (base := base_of(wanted[name])):
                wanted["contents"][name] += fingerprint(base) or base
        if self.chat_template is not None:
            wanted["contents"]["chat_template"] = read_template(self.chat_template)  # `export` reads it
        wanted["map"] = list(self.map)
        weights = wanted.pop("data_weight")
        if len(self.data) == 1:
            return wanted | {"data": self.data[0]}
        return wanted | {"data": list(self.data), "data_weight": list(weights or (1.0,) * len(self.data))}
