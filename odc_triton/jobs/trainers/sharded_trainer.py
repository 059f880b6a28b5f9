"""`ShardedTrainer`: the base of Trainers on a sharded model, for any data and step.

It checks the model, arguments and ranks; accelerate wraps nothing; norms are global; a checkpoint has masters and
optimizer states, written by their owners. A subclass adds data and the step. Nothing is patched.

[Note: who counts the ranks] Trainer gets its rank and the number of ranks from accelerate. Without GPUs accelerate
takes each process to be alone, unless the arguments have `use_cpu`: every rank would then be rank 0, and write. So it
is set whenever the model is on the CPU.

[Note: what accelerate wraps] Trainer has accelerate prepare the model, which wraps it in DistributedDataParallel on
several ranks. With `evaluation_mode` accelerate does not, and from 1.14 on it skips a prepared model. Before, this
trainer's own Accelerator does.

[Note: bf16=True] A model sharded with param_dtype=torch.bfloat16 computes in it already. Any other runs in accelerate's
autocast, as in plain Trainer, but without the cache of cast weights, which would hold the whole model in bf16.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, has_length, sort_checkpoints
from transformers.utils import is_accelerate_available

from ...base.files import folder_aside, remove_folder
from ...checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained
from ...checkpoint.failures import all_or_none
from ...checkpoint.folder import load_checkpoint, write_checkpoint
from ...checkpoint.pretrained_tensors import require_written
from ...checkpoint.write_pretrained import is_of_a_model
from ...engine.api import engine_of
from ...engine.minibatch import refuse_other_samples
from ...nn.operand import is_sharded
from ...optim import AdamW8bit
from ...packs.enable import enable_packing, refuse_prompt_learning
from ...packs.pack_loader import digest_of
from ...plan.cost import CostModel
from ...sharding.shard_module import fully_shard
from ...step import Objective, StepPart, StepReport, Sums, Terms, run_step
from .trainer_checkpoints import SHARDS, find_checkpoint, is_of_a_checkpoint

_ACCELERATE = "1.10.1"

# Optimizers that step inside of the backward, where `p.grad` is None.
_STEP_IN_BACKWARD = ("lomo", "layerwise")
# bitsandbytes' optimizers step plain tensors only; this one's names are those of our AdamW8bit.
_BITSANDBYTES = ("bnb", "paged", "lion", "ademamix")
_ADAMW_8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")


@dataclass(frozen=True)
class PackLoss(Objective):
    """By a trainer's methods: `count` of packs, and `loss_of` one."""

    count: Callable[[Any], int]
    loss_of: Callable[[nn.Module, Any, Terms], tuple[torch.Tensor, Sums]]

    def terms(self, model: nn.Module, packs: Any) -> int:
        return self.count(packs)

    def loss(self, model: nn.Module, pack: Any, terms: Terms) -> tuple[torch.Tensor, Sums]:
        return self.loss_of(model, pack, terms)


class ShardedTrainer(Trainer):
    """transformers' Trainer on a model of `fully_shard`, for subclasses that also have data and a step.

    In front of another Trainer it checks first: `class Mine(ShardedTrainer, GRPOTrainer)`. A subclass defines
    `training_step`, by `_run_step`; `_loop_state`, JSON that is the same on every rank and goes into checkpoints; and
    `_load_loop_state`.

    model: the sharded model, on every rank.
    trainer: arguments of the next Trainer.

    Raises ValueError or TypeError for a model that is not sharded and for unsupported arguments, NotImplementedError
    for trained parameters that saving would leave out, ImportError for an old accelerate.
    """

    takes_adapters: ClassVar[bool] = False  # the model may be PEFT's
    _aside: str | None = None  # where a checkpoint is being written

    # Fields of the arguments that are refused if set, and remedies.
    refused: ClassVar[Mapping[str, str]] = {
        "fsdp": "the model is sharded already: leave it out",
        "deepspeed": "the model is sharded already: leave it out",
        "parallelism_config": "the model is sharded over data-parallel ranks: leave it out",
        "fp16": "gradients are summed unscaled: give fully_shard an mp_policy with param_dtype=torch.bfloat16",
        "fp16_full_eval": "evaluation is in the dtype of fully_shard's mp_policy: leave it out",
        "bf16_full_eval": "evaluation is in the dtype of fully_shard's mp_policy: leave it out",
        "torch_compile": "compile the model's blocks instead, before or after fully_shard",
        "full_determinism": "gradients are added in the order of their arrival: give fully_shard exact=True",
        "auto_find_batch_size": "a minibatch that fails fails on all ranks: give the sampler a smaller token_cap",
        "use_liger_kernel": "apply it to the model before fully_shard",
        "save_on_each_node": "rank 0 writes for all nodes, into a folder that they share: leave it out",
        "torch_empty_cache_steps": "empty the cache in a callback",
    }

    def __init__(self, model: PreTrainedModel, args: TrainingArguments | None = None, **trainer: Any) -> None:
        if not is_accelerate_available(_ACCELERATE):
            name = type(self).__name__
            raise ImportError(f'{name} needs accelerate {_ACCELERATE} or newer: pip install "odc-triton[trainer]"')
        for name in ("peft_config", "quantization_config"):  # TRL's
            if trainer.get(name) is not None:
                before = "give it to from_pretrained" if name == "quantization_config" else "call peft.get_peft_model"
                instead = f"{before} before fully_shard" if self.takes_adapters else "leave it out"
                raise ValueError(f"{name} is given, but the trainer takes a sharded model: {instead}")
        _check_model(model, takes_adapters=self.takes_adapters)
        require_written(model)
        self._engine = engine_of(model)
        for name in ("train_dataset", "eval_dataset"):
            given = trainer.get(name)
            for each in given.values() if isinstance(given, dict) else [given]:
                if has_length(each) and not len(each):  # at which TRL's constructors end in a StopIteration
                    raise ValueError(f"{name}: the data set has no samples")
        self._accumulated = 1
        if args is not None:
            self._check_arguments(args)
            self._accumulated = _in_one_batch(args)
        args = TrainingArguments("tmp_trainer") if args is None else args  # Trainer's default
        if self._engine.heap.device.type == "cpu" and not args.use_cpu:  # see [Note: who counts the ranks]
            args.use_cpu = True
            vars(args).pop("_setup_devices", None)
            _ = args.device  # which asks accelerate again
        with self._engine.naming_lost(type(self).__name__), _looking_plain(model):
            super().__init__(model=model, args=args, **trainer)
        if self.args.world_size != self._engine.world:
            raise ValueError(
                f"accelerate counts {self.args.world_size} processes, and the model has {self._engine.world} ranks: "
                f"start them with torchrun, which sets RANK, WORLD_SIZE and LOCAL_RANK, before "
                f"{type(args).__name__}"
            )
        # Trainer's own hook would scale the noise by the pack's length.
        self._noise_alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        for name in ("fsdp", "deepspeed"):  # accelerate's launcher sets them in the environment
            if getattr(self, f"is_{name}_enabled"):
                raise ValueError(f"accelerate was started with {name}: {self.refused[name]} of its configuration")

    def _check_arguments(self, args: TrainingArguments) -> None:
        for name, instead in self.refused.items():
            if (value := getattr(args, name, None)) and not (self._engine.deterministic and name == "full_determinism"):
                raise ValueError(f"{type(args).__name__} has {name}={value!r}: {instead}")
        optim = getattr(args.optim, "value", args.optim)
        if any(word in optim for word in _STEP_IN_BACKWARD):
            raise ValueError(f"optim is {optim!r}, which steps inside of the backward: choose adamw_torch")
        if optim == "adafactor":
            raise ValueError("optim is 'adafactor', which takes means over whole matrices: choose adamw_torch")
        if optim not in _ADAMW_8BIT and any(word in optim for word in _BITSANDBYTES):
            raise ValueError(f"optim is {optim!r}, which can't step shards: choose adamw_bnb_8bit or adamw_torch")
        if optim == "paged_adamw_8bit" and self._engine.rank == 0:
            warnings.warn("optim is 'paged_adamw_8bit': its states are split over the ranks, not paged", stacklevel=2)
        if args.save_only_model and args.load_best_model_at_end:
            raise ValueError("load_best_model_at_end needs the masters in checkpoints: leave save_only_model out")

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: TrainingArguments, model: PreTrainedModel | None = None) -> tuple[Any, Any]:
        if args.optim in _ADAMW_8BIT:
            given = [each.partition("=") for each in (args.optim_args or "").replace(" ", "").split(",") if each]
            if any(name != "min_8bit_size" or not value.isdecimal() for name, _, value in given):
                raise ValueError(f"optim_args is {args.optim_args!r}: {args.optim} takes min_8bit_size=NUMBER only")
            how = {"betas": (args.adam_beta1, args.adam_beta2), **{name: int(value) for name, _, value in given}}
            return AdamW8bit, {"lr": args.learning_rate, "eps": args.adam_epsilon, **how}
        return Trainer.get_optimizer_cls_and_kwargs(args, model)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """See [Note: bf16=True]."""
        from accelerate.utils import AutocastKwargs

        made = super()._build_accelerator_args(**kwargs)
        if all(unit.policy.param_dtype is torch.bfloat16 for unit in self._engine.units):
            made["mixed_precision"] = "no"
        made["kwargs_handlers"].append(AutocastKwargs(cache_enabled=False))
        return made

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if not is_accelerate_available("1.14.0"):  # see [Note: what accelerate wraps]
            self.accelerator.prepare_model = partial(_prepare_once, self.accelerator.prepare_model)

    @property
    def _cost(self) -> CostModel:
        return CostModel.from_config(self.model.config.get_text_config())

    def _check_adapters(self) -> None:
        """Warns where TRL's reference would be a copy of the adapters, which are trained already. Collective."""
        if "ref" in self.model.peft_config:
            return
        parts = [value.to_local() for name, value in self.model.named_parameters() if "lora_B" in name]
        trained = any(bool(each.any()) for each in parts)
        if any(each["trained"] for each in self._engine.exchange("look at the adapters", {"trained": trained})):
            warnings.warn(
                "the adapters are trained already, and the reference is the model without them: for TRL's, add a copy "
                'of them named "ref" before fully_shard',
                stacklevel=3,
            )

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: Any, *given: Any, **options: Any) -> Any:
        """TRL's, which drops what `max_length` leaves nothing of to learn. Raises ValueError if that is all."""
        made = super()._prepare_dataset(dataset, processing_class, args, *given, **options)
        if has_length(made) and has_length(dataset) and len(dataset) and not len(made):
            name = options.get("dataset_name", given[-1] if given else "")
            raise ValueError(
                f"max_length={args.max_length} leaves nothing to learn of any of {len(dataset)} samples of the {name} "
                f"data set: set a larger max_length in {type(args).__name__}, or None"
            )
        return made

    # ------------------------------------------------------------------ a step

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader | None = None) -> nn.Module:
        """The model itself, see [Note: what accelerate wraps]."""
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def _set_mode(self, *, training: bool) -> None:
        self.model.train(training)
        switch = getattr(self.optimizer, "train" if training else "eval", None)
        if callable(switch):  # schedule-free optimizers have two modes, with other weights
            switch()

    def _publish_edits(self, purpose: str, edit: Callable[[], None] = lambda: None) -> None:
        """Before parameters are read outside of minibatches: all ranks come here, `edit` theirs while none reads, and
        then read what all have written, in callbacks too.
        """
        self._engine.exchange(purpose, {})
        edit()
        self._engine.publish()  # reads wait until all ranks have

    def _run_step(
        self, packs: Any, objective: Objective, parts: Sequence[StepPart] = ()
    ) -> tuple[torch.Tensor, StepReport]:
        """A minibatch of `run_step`: its loss, as Trainer takes it, and its report."""
        self._set_mode(training=True)
        report = run_step(self.model, packs, objective, parts=parts)
        return torch.tensor(report.loss, dtype=torch.float32, device=self.args.device), report

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _sharded_reference(self, needed: str) -> nn.Module:
        """The model as it was loaded, frozen, on the model's ranks. `needed`: why, for the error without a source."""
        source = self.model.config._name_or_path
        if not source:
            raise ValueError(
                f"{needed}, and the reference model is loaded from the model's folder or hub id, which "
                f"is unknown: load the model by from_pretrained, or set model.config._name_or_path"
            )
        with torch.random.fork_rng(devices=[]):  # TRL has seeded for its own shuffles by now
            reference = meta_causal_lm(model=source)
            enable_packing(reference)
            grid = self._engine.grid
            reference = fully_shard(
                reference.requires_grad_(False),
                mesh=grid.mesh if grid.mesh.ndim == 1 else None,  # two dimensions are all ranks of the job
                mp_policy=self._engine.units[0].policy,
                backend=self._engine.heap.device.type,
                timeout=timedelta(seconds=self._engine.barrier.timeout_s),
            )
        load_pretrained_shards(reference, source)
        return reference

    # ------------------------------------------------------------------ evaluation

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Trainer's, of the parameters as they are when the last rank begins."""
        with self._engine.naming_lost("evaluate"):
            if not self.is_in_train:
                self._require_same("eval_dataset", self.eval_dataset if eval_dataset is None else eval_dataset)
            return super().evaluate(eval_dataset, *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, as `evaluate`."""
        with self._engine.naming_lost("predict"):
            self._require_same("test_dataset", test_dataset)
            return super().predict(test_dataset, *args, **kwargs)

    def _require_same(self, name: str, given: Any) -> None:
        """Raises RanksDiffer for a data set that is another one on some rank, such as this rank's shard of it.

        Its samples are compared if a second read gives the same ones: data may be generated at each access.
        """
        if self._engine.world == 1:
            return
        if isinstance(given, str) and isinstance(self.eval_dataset, dict):
            given = self.eval_dataset.get(given)
        sets = given if isinstance(given, dict) else {"": given}

        def read(times: str) -> list[Any]:
            with self._engine.barrier.working():  # it may take any time
                own = [[key, digest_of(each)] for key, each in sets.items()]
            return [each["own"] for each in self._engine.exchange(f"compare {name}{times}", {"own": own})]

        found = read("")
        if any(each != found[0] for each in found) and read(" again") == found:
            refuse_other_samples(found, name)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self._publish_edits("evaluate", partial(self._set_mode, training=False))
        output = super().evaluation_loop(*args, **kwargs)
        self._engine.exchange("the end of an evaluation", {})  # who goes on may write
        return output

    # ------------------------------------------------------------------ saving and resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trainer's. `resume_from_checkpoint=True` takes the newest whole checkpoint of `output_dir`."""
        with self._engine.naming_lost("train"):
            self._require_same("train_dataset", self.train_dataset)
            self._require_same("eval_dataset", self.eval_dataset)
            return super().train(self._found(resume_from_checkpoint), *args, **kwargs)

    def _found(self, given: str | bool | None) -> str | bool | None:
        """The checkpoint to go on from, as rank 0 finds it. Raises CheckpointCorrupt, a ValueError, on all ranks."""
        if not given:
            return given
        with all_or_none(self._engine, "find the checkpoint") as shared:
            if self._engine.rank == 0:
                with self._engine.barrier.working():  # it may read all of a checkpoint
                    shared["found"] = find_checkpoint(given, Path(self.args.output_dir))
        return shared.all[0]["found"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder for plain transformers, or PEFT, in the compute dtype. Every rank calls it; rank 0 writes."""
        with self._engine.naming_lost("save_model"):
            self._publish_edits("save the model")
            with all_or_none(self._engine, "save the model"), self._engine.barrier.working():
                super().save_model(output_dir, _internal_call)  # rank 0 reads the others' shards

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            made = folder / ".model"
            processor, source = self.processing_class, None
            if getattr(processor, "video_processor", "") is None:  # its files are copied, as it can't be made here
                source = processor.tokenizer.name_or_path or None
            save_pretrained(self.model, made, processor, processor=source, overwrite=True)
            files = {file.name for file in made.iterdir()}
            for name in files:  # checkpoints may be in the same folder
                if (made / name).is_dir():
                    shutil.rmtree(folder / name, ignore_errors=True)
                os.replace(made / name, folder / name)
            made.rmdir()
            if any(name.startswith("model") for name in files):  # not only adapters
                for old in {*folder.glob("model*")} - {folder / name for name in files}:
                    if is_of_a_model(old.name):  # transformers would load an older model.safetensors before new parts
                        old.unlink()
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's, under a temporary name: `checkpoint-N` is there once every rank has written all of it."""
        run, state, writes = self._get_output_dir(trial), self.state, self.args.should_save
        final = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        purpose = f"save {final.name}"
        with ExitStack() as writing:
            with all_or_none(self._engine, purpose) as shared:
                if writes:
                    aside = writing.enter_context(folder_aside(final, overwrite=True, replaces=is_of_a_checkpoint))
                    shared["aside"] = str(aside)
            self._aside = shared.all[0]["aside"]
            try:
                with all_or_none(self._engine, purpose):
                    super()._save_checkpoint(model, trial)
            finally:
                made, self._aside = Path(self._aside, final.name), None
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or best.is_dir():
                state.best_model_checkpoint = str(best)
            with all_or_none(self._engine, purpose), self._engine.barrier.working():
                if writes:
                    state.save_to_json(made / TRAINER_STATE_NAME)
                    for each in made.iterdir():
                        each.rename(aside / each.name)
                    made.rmdir()
                    writing.close()
                    if (limit := self.args.save_total_limit or 0) > 0:
                        paths = map(Path, sort_checkpoints(run, use_mtime=True))
                        old = [path for path in paths if path not in (final, best)]
                        for path in old[: max(0, len(old) + sum(map(Path.is_dir, {final, best})) - limit)]:
                            remove_folder(path)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _get_output_dir(self, trial: Any) -> str:
        return self._aside or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside is None:  # else it is not whole yet
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_checkpoint(
            Path(output_dir, SHARDS),
            model=self.model,
            optimizer=self._plain_optimizer,
            state=self._loop_state(),
            step=self.state.global_step,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_checkpoint(Path(resume_from_checkpoint, SHARDS), model=self.model, optimizer=None)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        own = {"model": self.model, "optimizer": self._plain_optimizer}
        self._load_loop_state(load_checkpoint(Path(checkpoint, SHARDS), **own))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))


@contextmanager
def _looking_plain(model: nn.Module) -> Iterator[None]:
    """TRL's constructors cast the adapters of a model that looks quantised to bf16, out of the heap."""
    looks = {name: getattr(model, name) for name in ("is_loaded_in_4bit", "is_loaded_in_8bit") if hasattr(model, name)}
    vars(model).update(dict.fromkeys(looks, False))
    try:
        yield
    finally:
        vars(model).update(looks)


def _prepare_once(prepare: Callable[..., nn.Module], model: nn.Module, *given: Any, **how: Any) -> nn.Module:
    """accelerate's `prepare_model`, as it is from 1.14 on."""
    if not getattr(model, "_is_accelerate_prepared", False):
        model = prepare(model, *given, **how)
        model._is_accelerate_prepared = True
    return model


def _in_one_batch(args: TrainingArguments) -> int:
    """Merges the batches of a step, as a minibatch has any number of microbatches; returns their number."""
    options = args.accelerator_config.gradient_accumulation_kwargs or {}
    steps = args.gradient_accumulation_steps * options.get("num_steps", 1)  # Trainer refuses both
    if "num_steps" in options:
        options["num_steps"] = 1
    args.per_device_train_batch_size *= steps
    args.gradient_accumulation_steps = 1
    return steps


def _check_model(model: Any, *, takes_adapters: bool) -> None:
    is_adapted = takes_adapters and hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    if not isinstance(model.get_base_model() if is_adapted else model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}; give the transformers model that fully_shard returned, not wrapped"
        )
    refuse_prompt_learning(model)
    if not is_sharded(model):
        raise ValueError(
            f"{type(model).__name__} is not sharded: call odc_triton.hf.enable_packing(model), then "
            f"odc_triton.fully_shard(model), before the trainer"
        )
