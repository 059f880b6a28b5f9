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

__all__: list[str]
