"""`ODCTrainer`: transformers' Trainer, whose step is one minibatch of this rank's packs.

Trainer's batch is here a list of any number of packs, which may be empty, so gradient accumulation is not needed.
Everything else, schedules, callbacks, logging, saving, is Trainer's own: sharded_trainer.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from ...objectives.cross_entropy import CrossEntropy
from ...packs.chunks import compute_in_chunks
from ...packs.enable import ATTENTION_NAME, innermost, is_packed
from ...packs.images import sees_images, trains_tower
from ...packs.loss import TAKEN, untaken
from ...packs.neftune import embedding_noise
from ...packs.pack_loader import PackLoader, is_drawn, measured, refuse_drawn, tower_costs
from ...packs.router_loss import router_weight
from ...plan.fields import TOKEN_TYPES
from ...plan.plan import MinibatchPacks
from ...plan.sampler import MinibatchSampler
from ...plan.tower import TowerCost
from ...sequence.exchange import SequenceExchange
from ...step import StepPart, StepReport, Sums, Terms, evaluate
from .image_records import ImageRecords, has_image_records
from .sharded_trainer import PackLoss, ShardedTrainer
from .streams import StreamedSteps, collate_step

_UNPACKED = (
    "two samples fit into a pack, and the model's attention does not keep documents apart: call "
    "odc_triton.hf.enable_packing(model) before fully_shard"
)


class ODCTrainer(ShardedTrainer):
    """transformers' Trainer on a model of `fully_shard`.

        enable_packing(model)
        model = fully_shard(model)
        ODCTrainer(model, TrainingArguments(...), train_dataset=samples).train()

    Pass the sharded model, on every rank. A sample of `train_dataset` has `input_ids` and optionally `labels` (-100:
    not learned), tokenised, without padding, and with images the fields that `pack_collate` takes. One step takes
    world * `per_device_train_batch_size` * `gradient_accumulation_steps` samples, and its loss is the mean over the
    target tokens of all ranks. Logs also have `target_tokens`, those of all ranks since the last log. `evaluate()`
    returns the loss per target token of the whole set; `compute_metrics` and `predict` work as in Trainer, on batches
    of text by `data_collator`, which is not used otherwise. With `bf16=True` a model that was sharded in fp32 computes
    in autocast, as in Trainer.

    A model may have PEFT's adapters, added before `fully_shard`. A checkpoint's folder loads in plain transformers, or
    PEFT, and has masters and optimizer states of trained parameters in `odc/`. Training can be resumed on another
    number of ranks, with a `per_device_train_batch_size` that keeps the samples per step. Call `save_model` on each.

    It combines with another Trainer, as ODCSFTTrainer does. For another loss override `compute_loss`.

    `train_dataset` may be an IterableDataset, torch's or `datasets`', the same on every rank, with `max_steps`. A step
    takes its next samples, whose longest is then the token cap; a run that goes on reads those that were taken again.

    Records with "image" or "images" and no `input_ids`, as TRL has them, become samples one by one: `data_collator`, by
    default SFTTrainer's, gets a list of one record and returns what the model's processor makes of it, and `labels`.
    Each record is read once more before the first step, to know its length.

    model: what `fully_shard` returned.
    args: as Trainer's.
    sampler: a MinibatchSampler of this rank over `train_dataset`. By default one with balance "mini", the longest
        sample as token cap and `data_seed` or `seed`; images cost what the vision tower computes.
    split: the default sampler splits long samples over ranks, on a model of `enable_split`.
    trainer: other arguments of transformers' Trainer, such as `train_dataset`.

    Raises ValueError or TypeError for a model that is not sharded and for unsupported arguments.
    """

    takes_adapters: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = ShardedTrainer.refused | {
        "packing": "TRL's packs would be taken for samples: leave it out, the trainer packs",
        "eval_packing": "TRL's packs would be taken for samples: leave it out, the trainer packs",
        "activation_offloading": "TRL's step is not run: leave it out, and after fully_shard call "
        "odc_triton.hf.offload_checkpoints(model)",
    }

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        sampler: MinibatchSampler | None = None,
        split: bool = False,
        **trainer: Any,
    ) -> None:
        _check_given(trainer)
        self._records: dict[int, ImageRecords] = {}  # by the id of a data set, which they keep
        super().__init__(model, args, **trainer)
        self._sampler = self._given_sampler = sampler
        self._target_tokens = 0
        self._is_sft = any(each.__name__ == "SFTTrainer" for each in type(self).__mro__)  # which has metrics of tokens
        dft = self._is_sft and getattr(self.args, "loss_type", None) == "dft"
        smoothing = 0.0 if dft else self.args.label_smoothing_factor
        self._objective = CrossEntropy(label_smoothing=smoothing, dft=dft, measures=self._is_sft)
        self._terms, self._pack_sums = Terms(number=1), {}  # of the pack that is computed
        segments = self._engine.participant(SequenceExchange)
        self._split_tokens, self._split_cuts = 0, None
        if segments is not None:
            self._split_cuts = segments.split_cuts
            self._split_tokens = segments.tokens if split else getattr(sampler, "split_tokens", 0)
        if split and not self._split_tokens:
            raise ValueError("split=True: call odc_triton.enable_split(model, tokens=…) after fully_shard")
        if split and sampler is not None:
            raise ValueError("split=True with a sampler: give MinibatchSampler(…, split=True) instead")
        if self._noise_alpha and (
            split or (sampler is not None and (sampler.split_tokens or sampler.relatives is not None))
        ):
            raise ValueError(
                "neftune_noise_alpha with segments of samples, which don't know their sample's length: leave it out, "
                "or split=True and the sampler's `split` and `relatives`"
            )
        self._is_streamed = isinstance(self.train_dataset, IterableDataset)
        if self._is_streamed and (sampler is not None or split or self.args.dataloader_num_workers > 1):
            raise ValueError(
                "a sampler, split=True or dataloader_num_workers above 1 with an IterableDataset, whose samples every "
                "rank reads in order, a step at a time: leave them out, or give a data set with a length"
            )
        if segments is not None:
            compute_in_chunks(model)
        if self._accumulated > 1 and sampler is not None:
            raise ValueError(
                f"gradient_accumulation_steps={self._accumulated} with a sampler, which yields whole steps: set "
                f"1, and give it {self._accumulated} times the samples_per_rank"
            )

    def _check_arguments(self, args: TrainingArguments) -> None:
        super()._check_arguments(args)
        strategy = getattr(args, "train_sampling_strategy", "random")
        if strategy != "random":
            raise ValueError(
                f"train_sampling_strategy is {strategy!r}: samples are shuffled by data_seed and assigned by their "
                f"lengths. Leave it out, or give a sampler"
            )

    def get_train_dataloader(self) -> DataLoader:
        """This rank's packs, minibatch after minibatch."""
        if self.train_dataset is None:
            raise ValueError("training needs a train_dataset, whose samples have input_ids")
        if self._is_streamed:
            return self._stream_loader()
        samples = self._samples(self.train_dataset)
        sampler = self._given_sampler or self._make_sampler(samples, self.args.per_device_train_batch_size)
        self._check_sampler(sampler)
        if sampler.split_tokens or sampler.relatives is not None:
            refuse_drawn(samples, sampler.lengths)
        sampler.epoch = sampler.minibatch = 0
        self._sampler = sampler
        return self._loader(PackLoader, samples, sampler)

    def _stream_loader(self) -> DataLoader:
        if not is_packed(model := innermost(self.model)):
            raise ValueError(_UNPACKED)
        rank, ranks = self._engine.rank, self._engine.world
        count = ranks * self.args.per_device_train_batch_size
        self._sampler = StreamedSteps(self.train_dataset, count, drop_last=self.args.dataloader_drop_last)
        tower = TowerCost.from_config(model.config, trained=trains_tower(model)) if sees_images(model) else None
        how = {"cost": self._cost, "tower": tower, "untaken": untaken(self.model)}
        collate = partial(collate_step, rank=rank, ranks=ranks, **how)
        return self._loader(DataLoader, self._sampler, batch_size=None, collate_fn=collate)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """Packs, or Trainer's padded batches if there is a `compute_metrics`."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str):
            chosen = self.eval_dataset[chosen]
        if self.compute_metrics is not None:
            self._refuse_padded_images()
            return super().get_eval_dataloader(eval_dataset)
        if chosen is None:
            raise ValueError("evaluation needs an eval_dataset, whose samples have input_ids")
        samples = self._samples(chosen)
        sampler = self._make_sampler(samples, self.args.per_device_eval_batch_size, whole=True)
        return self._loader(PackLoader, samples, sampler)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        self._refuse_padded_images()
        return super().get_test_dataloader(test_dataset)

    def _refuse_padded_images(self) -> None:
        if sees_images(innermost(self.model)):
            raise ValueError(
                f"{type(self.model).__name__} sees images, and compute_metrics and predict pad batches, which only "
                f"text can be: evaluate without compute_metrics"
            )

    def _samples(self, dataset: Any) -> Any:
        """The data set, whose records become samples if they have images and no tokens."""
        if not has_image_records(dataset):
            measured(dataset, [0], untaken=self._untaken(dataset))  # else not looked at if a sampler is given
            return dataset
        made = ImageRecords(dataset, self.data_collator, self.processing_class)
        return self._records.setdefault(id(dataset), made)

    def _loader(self, kind: type[DataLoader], *given: Any, **options: Any) -> DataLoader:
        args = self.args
        return kind(
            *given,
            **options,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and self._engine.heap.device.type == "cuda",
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
        )

    def _make_sampler(self, dataset: Any, samples_per_rank: int, *, whole: bool = False) -> MinibatchSampler:
        args, sizes = self.args, self._sizes(dataset)
        return MinibatchSampler(
            samples_per_rank=samples_per_rank,
            token_cap=max(sizes["lengths"]),
            seed=args.seed if args.data_seed is None else args.data_seed,
            rank=self._engine.rank,
            world=self._engine.world,
            drop_last=args.dataloader_drop_last and not whole,
            split=0 if whole and is_drawn(dataset) else self._split_tokens,
            split_cuts=self._split_cuts,
            replicas=self._engine.grid.replicas,
            **sizes,
        )

    def _sizes(self, dataset: Any) -> dict[str, Any]:
        """Of the samples, as MinibatchSampler takes it."""
        lengths, floors, values = self._measured(dataset)
        extra = tower_costs(self.model, values)
        return {"lengths": lengths, "cost": self._cost, "extra": extra, "floors": floors}

    def _measured(self, dataset: Any) -> tuple[list[int], list[int], list[list[int]]]:
        """`measured` of the whole data set. Records are processed for it: once, and by each rank a part of them."""
        if not isinstance(dataset, ImageRecords):
            return measured(dataset, untaken=self._untaken(dataset))
        if dataset.measured is None:
            rank, world = self._engine.rank, self._engine.world
            mine = measured(dataset, range(rank, len(dataset), world), untaken=untaken(self.model))
            reports = self._engine.exchange("measure the data set", {"measured": mine})
            columns = zip(*(each["measured"] for each in reports), strict=True)  # of each, by rank
            places = range(len(dataset))
            dataset.measured = tuple([parts[at % world][at // world] for at in places] for parts in columns)
        return dataset.measured

    def _untaken(self, dataset: Any) -> Set[str]:
        """`untaken`, and all others where they are to be passed on: a forward may swallow them by **kwargs."""
        kept = not self.args.remove_unused_columns and hasattr(dataset, "__len__") and isinstance(dataset[0], Mapping)
        return untaken(self.model) | ({*dataset[0]} - {*TAKEN, *TOKEN_TYPES} if kept else set())

    def _check_sampler(self, sampler: MinibatchSampler) -> None:
        if not isinstance(sampler, MinibatchSampler):
            raise TypeError(f"sampler is a {type(sampler).__name__}; give an odc_triton.balance.MinibatchSampler")
        if (sampler.rank, sampler.world) != (self._engine.rank, self._engine.world):
            raise ValueError(
                f"sampler is of rank {sampler.rank} of {sampler.world}, the model of rank {self._engine.rank} of "
                f"{self._engine.world}: give the sampler the model's rank and world"
            )
        if sampler.split_tokens and sampler.replicas != (replicas := self._engine.grid.replicas):
            raise ValueError(
                f"sampler splits samples over replicas={sampler.replicas}, and the model has {replicas}: give "
                f"MinibatchSampler(…, replicas={replicas})"
            )
        if len(sampler.lengths) != len(self.train_dataset):
            raise ValueError(
                f"sampler has {len(sampler.lengths)} lengths and train_dataset {len(self.train_dataset)} samples"
            )
        packs_differ = self.model.config.get_text_config()._attn_implementation != ATTENTION_NAME
        if packs_differ and sum(sorted(sampler.lengths)[:2]) <= sampler.token_cap and len(sampler.lengths) > 1:
            raise ValueError(_UNPACKED)

    def training_step(
        self, model: nn.Module, inputs: Sequence[Mapping[str, Tensor]], num_items_in_batch: Any = None
    ) -> Tensor:
        """One minibatch: forward and backward of this rank's packs. Returns the loss per target token of all ranks."""
        is_packs = isinstance(inputs, list) and all(isinstance(pack, Mapping) for pack in inputs)
        if not is_packs or not all("labels" in pack or "shift_labels" in pack for pack in inputs):
            raise TypeError(
                f"a batch is a {type(inputs).__name__} and not a list of packs: leave get_train_dataloader as it is, "
                f"or return a DataLoader with a MinibatchSampler as batch_sampler and collate_fn=pack_collate"
            )
        self._set_mode(training=True)
        packs = MinibatchPacks.like(inputs, inputs)
        targets = self._count_targets(packs)  # an error here is no failed minibatch
        loss, report = self._run_step(packs, PackLoss(lambda _: targets, self._loss_of))
        self._target_tokens += report.terms
        if self._is_sft:
            self._total_train_tokens += int(report.sums.get("input_tokens", 0))
            self._append_metrics("train", report)
            if router_weight(model):
                self._metrics["train"]["aux_loss"].append(report.sums.get("router", 0.0) / packs.samples)
        return loss

    def _count_targets(self, packs: Any) -> int:
        """The terms of the packs' losses."""
        return self._objective.terms(self.model, packs)

    def _loss_of(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        """Of one pack: `compute_loss`, and the sums that it has left."""
        self._terms, self._pack_sums = terms, {}
        tokens, pack = pack["input_ids"].numel(), self._prepare_inputs(pack)
        with embedding_noise(model, self._noise_alpha, pack):
            loss = self.compute_loss(model, pack, num_items_in_batch=terms.number)
        return loss, {**self._pack_sums, "input_tokens": tokens}

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """A pack's summed loss divided by the target tokens of all ranks. In training
        a router's auxiliary loss is added: of each sample, weighted and divided by the samples of all ranks.

        Override it for a custom loss: a sum over the pack, divided in the same way. It must not wait for other ranks,
        which may have another number of packs.
        """
        if return_outputs:  # Trainer's own evaluation, of padded batches
            options = {"output_router_logits": False} if router_weight(model) else {}
            outputs = model(**inputs, **options, use_cache=False)
            if self.label_smoother is None:
                return outputs.loss, outputs
            return self.label_smoother(outputs, inputs["labels"], shift_labels=True), outputs
        terms = replace(self._terms, number=num_items_in_batch)
        loss, sums = self._objective.loss(model, inputs, terms)
        # An override may call this more than once.
        self._pack_sums = {name: self._pack_sums.get(name, 0.0) + value for name, value in sums.items()}
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """The FLOPs of all packs, by Trainer's estimate."""
        flos = 0
        for pack in inputs if isinstance(inputs, list) else [inputs]:
            flos += super().floating_point_ops(pack)
        return flos

    def _track_num_input_tokens(self, inputs: Any) -> None:
        ids = torch.zeros(sum(pack["input_ids"].numel() for pack in inputs))
        super()._track_num_input_tokens({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self._target_tokens:
            logs["target_tokens"], self._target_tokens = self._target_tokens, 0
        super().log(logs, start_time)

    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """The loss per target token of all ranks, over packs; that of padded batches is a mean, in Trainer's loop."""
        if not isinstance(dataloader, PackLoader):
            return super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        self._publish_edits("evaluate", partial(self._set_mode, training=False))
        self.callback_handler.eval_dataloader = dataloader
        report = self._evaluated(self._followed(dataloader))
        if self._is_sft:
            self._append_metrics("eval", report)
        metrics = {f"{metric_key_prefix}_loss": report.loss / report.terms if report.terms else math.nan}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=len(dataloader.dataset))

    def _evaluated(self, minibatches: Iterable[Any], parts: Sequence[StepPart] = ()) -> StepReport:
        return evaluate(self.model, minibatches, PackLoss(self._count_targets, self._loss_of), parts=parts)

    def _followed(self, dataloader: DataLoader) -> Iterator[Any]:
        """Yields the minibatches, and calls the callbacks after each."""
        for packs in dataloader:
            yield packs
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

    def _append_metrics(self, mode: str, report: StepReport) -> None:
        """Means over target tokens to SFTTrainer's lists; none of what a fused head or another loss does not give."""
        for name, key in (("entropy", "entropy"), ("mean_token_accuracy", "accuracy")):
            if not math.isnan(total := report.sums.get(key, math.nan)):
                self._metrics[mode][name].append(total / max(report.terms, 1))
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]

    def _loop_state(self) -> dict[str, Any]:
        return {"sampler": self._sampler.state_dict(minibatches_done=self.state.global_step)}

    def _load_loop_state(self, state: dict[str, Any]) -> None:
        # Trainer skips the minibatches of the epoch.
        self._sampler.load_state_dict(state["sampler"] | {"minibatch": 0})


def _check_given(trainer: dict[str, Any]) -> None:
    if trainer.get("compute_loss_func") is not None:
        raise ValueError("compute_loss_func is given: override compute_loss instead, which returns a pack's loss")
    collator = trainer.get("data_collator")
    allowed = trainer.get("compute_metrics") is not None or has_image_records(trainer.get("train_dataset"))
    if collator is not None and not allowed:
        raise ValueError(
            f"data_collator is {collator!r}, but training packs samples without padding: leave it out, and mark what "
            f"is learned in the samples' labels"
        )
