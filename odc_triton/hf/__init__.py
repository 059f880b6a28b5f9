"""transformers' models on packed sequences: attention within documents, and the loss.

A *pack* is several documents side by side in one row, without padding: `input_ids`, `position_ids` (int64,
shape [1, T]; positions restart at every document) and `labels` (int64, [1, T]; -100 where nothing is
predicted, hence at the first token of every document, which no earlier token may predict). A pack with pieces of
samples has `shift_labels` and `pieces` instead. Documents may have pictures, for the families in images.py.
"""

from typing import TYPE_CHECKING

from ..base.lazy import lazy_names

if TYPE_CHECKING:
    from .attention import PackingUnsupported as PackingUnsupported
    from .attention import packed_attention as packed_attention
    from .attention import packed_mask as packed_mask
    from .chunks import compute_in_chunks as compute_in_chunks
    from .dpo_trainer import ODCDPOTrainer as ODCDPOTrainer
    from .enable import enable_packing as enable_packing
    from .grpo_trainer import ODCGRPOTrainer as ODCGRPOTrainer
    from .loss import distillation_loss as distillation_loss
    from .loss import model_inputs as model_inputs
    from .loss import summed_loss as summed_loss
    from .loss import summed_losses as summed_losses
    from .offload import offload_checkpoints as offload_checkpoints
    from .reward_trainer import ODCRewardTrainer as ODCRewardTrainer
    from .sft_trainer import ODCSFTTrainer as ODCSFTTrainer
    from .trainer import ODCTrainer as ODCTrainer

_HOME = {
    "ODCDPOTrainer": "dpo_trainer",
    "ODCGRPOTrainer": "grpo_trainer",
    "ODCRewardTrainer": "reward_trainer",
    "ODCSFTTrainer": "sft_trainer",
    "ODCTrainer": "trainer",
    "PackingUnsupported": "attention",
    "compute_in_chunks": "chunks",
    "distillation_loss": "loss",
    "enable_packing": "enable",
    "model_inputs": "loss",
    "offload_checkpoints": "offload",
    "packed_attention": "attention",
    "packed_mask": "attention",
    "summed_loss": "loss",
    "summed_losses": "loss",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
for _name in ("ODCDPOTrainer", "ODCGRPOTrainer", "ODCRewardTrainer", "ODCSFTTrainer"):
    __all__.remove(_name)  # they need TRL, an optional package
