"""`ODCSFTTrainer`: TRL's SFTTrainer, whose step is one minibatch of this rank's packs."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, TrainingArguments

from .trainer import ODCTrainer
from .trl_metrics import GET_TRL, TRL, check_version

try:
    from trl import SFTTrainer
except ImportError as error:
    raise ImportError(f"ODCSFTTrainer needs TRL {TRL}: {GET_TRL}") from error


class ODCSFTTrainer(ODCTrainer, SFTTrainer):
    """ODCTrainer on the data that TRL's SFTTrainer prepares, with its losses and metrics, of all ranks' target tokens;
    without `mean_token_accuracy` for a fused head.

    model, args, sampler, split: as of `ODCTrainer`; args may be a SFTConfig.
    trainer: other arguments of SFTTrainer.

    Raises ImportError for another TRL: an old one masks what is not learned in its collator, which packs don't use.
    """

    def __init__(self, model: PreTrainedModel, args: TrainingArguments | None = None, **trainer: Any) -> None:
        check_version("ODCSFTTrainer")
        super().__init__(model, args, **trainer)
