"""`PairTrainer`: ODCTrainer on pairs of a chosen and a rejected document, the base of ours in front of TRL's trainers.

A pack is TRL's padded batch of its n pairs, [2n, S], first the chosen rows, and these rows without padding, as the
model computes them: a prefix that they share is computed once. A pair is always in one pack. TRL's own loss of a
pack, a mean over its pairs, is multiplied by n / N, with the N pairs of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainingArguments

from ...packs.collate import PackedDataset, pack_collate
from ...packs.enable import innermost, refuse_unpacked, takes_branches
from ...plan.entries import number_of
from ...plan.fields import IGNORED
from ...plan.plan import MinibatchPacks
from ...plan.relatives import find_relatives
from ...step import StepPart, StepReport, Sums, Terms
from .sharded_trainer import PackLoss
from .trainer import ODCTrainer
from .trl_metrics import alone, check_given


def completions(batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows of TRL's padded batch, as `pack_collate` takes them; the tokens of `completion_mask` are learned."""
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
    columns = zip(batch["input_ids"], labels, batch["attention_mask"].bool(), strict=True)
    return [{"input_ids": ids[mask], "labels": labels[mask]} for ids, labels, mask in columns]


class PairTrainer(ODCTrainer):
    """ODCTrainer on preference pairs, for a subclass in front of a trainer of TRL's. It defines `_mean_loss_of`.

    sampler: over the pairs; by default one that knows what a pack computes of them.
    share_prefixes: "auto": tokens that documents of a pack begin with are computed once, where the model can; not with
        `neftune_noise_alpha`. "off": for each document.
    trainer: other arguments of TRL's trainer.
    """

    config: ClassVar[type[TrainingArguments]]  # TRL's
    _rows_of: Callable = staticmethod(completions)
    refused: ClassVar[Mapping[str, str]] = ODCTrainer.refused | {
        "label_smoothing_factor": "TRL's loss has no targets to smooth: leave it out",
    }

    def __init__(
        self,
        model: PreTrainedModel,
        args: TrainingArguments | None = None,
        *,
        share_prefixes: Literal["auto", "off"] = "auto",
        **trainer: Any,
    ) -> None:
        check_given(type(self).__name__, args, self.config, share_prefixes)
        if trainer.get("compute_metrics") is not None:
            raise ValueError("compute_metrics is given, and packs have no logits for it: leave it out")
        super().__init__(model, args, **trainer)
        if self._is_streamed:
            raise TypeError("train_dataset is an IterableDataset, whose pairs are not known before: give a data set")
        if getattr(self, "_is_vlm", False):
            raise TypeError(f"processing_class is a {type(self.processing_class).__name__}; give a tokenizer, for text")
        if self._split_tokens:
            raise ValueError("pairs are computed whole: leave out split=True, and the sampler's split")
        refuse_unpacked(model)
        self._shares = share_prefixes == "auto" and self._noise_alpha is None and takes_branches(innermost(model))

    def _samples(self, dataset: Any) -> Any:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no length, and pairs are assigned by what they cost: give a data set, "
                f"such as datasets.Dataset.from_list(list(stream.take(n)))"
            )
        return self._remove_unused_columns(dataset) if hasattr(dataset, "column_names") else dataset

    def _sizes(self, dataset: Any) -> dict[str, Any]:
        """Each pair's tokens in a pack, and what they cost in addition to a cost per token."""
        rank, world, cost = self._engine.rank, self._engine.world, self._cost
        mine = []
        for index in range(rank, len(dataset), world):
            (batch,) = self._collate([[dataset[index]]])
            last = batch["pack"]["position_ids"] + 1
            mine.append((last.numel(), cost.quadratic * int((2 * last - 1).sum())))
        parts = [each["sizes"] for each in self._engine.exchange("measure the pairs", {"sizes": mine})]
        lengths, extra = zip(*(parts[at % world][at // world] for at in range(len(dataset))), strict=True)
        return {"lengths": lengths, "cost": replace(cost, quadratic=0.0), "extra": extra}

    def _loader(self, *given: Any) -> DataLoader:
        return super()._loader(*given, collate_fn=self._collate)

    @property
    def _collate(self) -> Callable:
        """What a loader's workers can be sent."""
        return partial(_batches, self.data_collator, self._rows_of, self._shares)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        raise ValueError(f"{type(self).__name__}.predict: packs have no logits to return; call evaluate instead")

    def training_step(self, model: nn.Module, inputs: list[dict[str, Any]], num_items_in_batch: Any = None) -> Tensor:
        """One minibatch: forward and backward of this rank's packs. Returns the mean loss of all ranks' pairs."""
        self._measure(inputs)
        packs, tokens = MinibatchPacks.like(inputs, inputs), self._total_train_tokens  # TRL's loss adds this rank's
        with alone(self, "train") as metrics:
            loss, report = self._run_step(packs, PackLoss(self._count_targets, self._loss_of), [metrics])
        self._total_train_tokens = tokens + int(report.sums.get("tokens", 0))
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def _measure(self, packs: Sequence[Mapping[str, Any]]) -> None:
        """Before packs are computed, what is known of those of all ranks only. Ranks call it together."""

    def _loss_of(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        tokens, batch = pack["attention_mask"].sum(), self._prepare_inputs(pack)
        return self.compute_loss(model, batch, num_items_in_batch=terms.number), {"tokens": tokens}

    def _count_targets(self, packs: Sequence[Mapping[str, Any]]) -> int:
        """Pairs, as their losses are summed."""
        return sum(len(pack["input_ids"]) // 2 for pack in packs)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """The sum of a pack's pairs' losses divided by `num_items_in_batch`, the pairs of all ranks."""
        pairs = self._pack_metrics.rows = len(inputs["input_ids"]) // 2
        return self._mean_loss_of(model, inputs) * (pairs / num_items_in_batch)

    def _mean_loss_of(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of one pack."""
        raise NotImplementedError

    @property
    def _pack_metrics(self) -> Any:
        return self._metrics["train" if self.model.training else "eval"]

    def _followed(self, dataloader: DataLoader) -> Iterator[Any]:
        for packs in super()._followed(dataloader):
            self._measure(packs)
            yield packs

    def _evaluated(self, minibatches: Iterable[Any], parts: Sequence[StepPart] = ()) -> StepReport:
        """The sum of all pairs' losses; and TRL's metrics."""
        with alone(self, "eval") as metrics:
            report = super()._evaluated(minibatches, [metrics, *parts])
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
        return report


def _batches(
    collator: Callable, rows_of: Callable, shares: bool, packs: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Of each pack of pairs TRL's batch; and `pack`, the model's input; `targets`, int64 [2, t], its t targets' rows
    in the batch and the columns that predict them.
    """
    made = []
    for pairs in packs:
        batch = collator(pairs)
        rows = rows_of(batch)
        entries = find_relatives(rows).entries(range(len(rows))) if shares else [*range(len(rows))]
        scored = [(rows[row := number_of(each)]["labels"][1:] != IGNORED, row) for each in entries]
        targets = [torch.stack([torch.full_like(at, row), at]) for mask, row in scored for at in mask.nonzero().T]
        (pack,) = pack_collate([PackedDataset(rows)[entries]])
        made.append({**batch, "pack": pack, "targets": torch.cat(targets, 1)})
    return MinibatchPacks.like(packs, made)
