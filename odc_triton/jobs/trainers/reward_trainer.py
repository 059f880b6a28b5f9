"""`ODCRewardTrainer`: TRL's RewardTrainer, whose step is one minibatch of this rank's packs: see pair_trainer.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...packs.enable import innermost
from ...packs.loss import predictions
from ...packs.neftune import embedding_noise
from ...packs.scores import gives_token_scores
from ...plan.fields import IGNORED
from .pair_trainer import PairTrainer
from .trl_metrics import GET_TRL, TRL

try:
    from trl import RewardConfig, RewardTrainer
except ImportError as error:
    raise ImportError(f"ODCRewardTrainer needs TRL {TRL}: {GET_TRL}") from error


class ODCRewardTrainer(PairTrainer, RewardTrainer):
    """TRL's RewardTrainer on a model of `fully_shard`: a sequence classifier of one label, on a decoder.

        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)
        enable_packing(model)
        model = fully_shard(model)
        trainer = ODCRewardTrainer(model, RewardConfig(...), train_dataset=pairs)
        trainer.train()

    Steps, loss, metrics, evaluation, checkpoints and resuming are as ODCDPOTrainer's.

    model: what `fully_shard` returned.
    args: as RewardTrainer's.
    trainer: other arguments of RewardTrainer, and those of ODCDPOTrainer.

    Raises ValueError or TypeError for a model that is not sharded and packed, or no such classifier, and for
    unsupported arguments, ImportError for another TRL.
    """

    config = RewardConfig
    refused: ClassVar[Mapping[str, str]] = PairTrainer.refused | {
        "chat_template_path": "it may add tokens to a model that is sharded already: set the tokenizer's chat_template",
    }

    def __init__(self, model: PreTrainedModel, args: RewardConfig | None = None, **trainer: Any) -> None:
        super().__init__(model, args, **trainer)
        if not gives_token_scores(innermost(model)):
            raise TypeError(
                f"{type(model).__name__} has no scores of single tokens: give a model of "
                f"AutoModelForSequenceClassification on a decoder, and call enable_packing on it"
            )

    @property
    def _rows_of(self) -> Callable:
        return partial(_scored, self.processing_class.pad_token_id)

    def _mean_loss_of(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return RewardTrainer.compute_loss(self, partial(self._outputs, model), inputs)

    def _outputs(
        self, model: nn.Module, *, input_ids: Tensor, pack: Mapping[str, Any], targets: Tensor, **_: Any
    ) -> SimpleNamespace:
        """The rows' scores, [2n, 1]."""
        with embedding_noise(model, self._noise_alpha, pack):
            scores, _ = predictions(model, pack)
        return SimpleNamespace(logits=torch.zeros_like(scores).index_put((targets[0],), scores))


def _scored(padding: int, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The rows, as `pack_collate` takes them, up to the token that transformers scores, the last that is no padding
    (which may be what ends a text), and one more, as if that were predicted.
    """
    ids = F.pad(batch["input_ids"], (0, 1), value=padding)
    last = (torch.arange(ids.shape[1]) * (ids != padding)).argmax(1)
    rows = [row[: at + 2] for row, at in zip(ids, last.tolist(), strict=True)]
    learned = [torch.arange(len(row)) == len(row) - 1 for row in rows]
    return [
        {"input_ids": row, "labels": row.masked_fill(~mask, IGNORED)} for row, mask in zip(rows, learned, strict=True)
    ]
