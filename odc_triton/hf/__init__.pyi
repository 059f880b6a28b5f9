from ..jobs.trainers.axolotl_plugin import AxolotlPlugin as AxolotlPlugin
from ..jobs.trainers.dpo_trainer import ODCDPOTrainer as ODCDPOTrainer
from ..jobs.trainers.grpo_trainer import ODCGRPOTrainer as ODCGRPOTrainer
from ..jobs.trainers.reward_trainer import ODCRewardTrainer as ODCRewardTrainer
from ..jobs.trainers.sft_trainer import ODCSFTTrainer as ODCSFTTrainer
from ..jobs.trainers.trainer import ODCTrainer as ODCTrainer
from ..packs.attention import PackingUnsupported as PackingUnsupported
from ..packs.attention import packed_attention as packed_attention
from ..packs.attention import packed_mask as packed_mask
from ..packs.chunks import compute_in_chunks as compute_in_chunks
from ..packs.enable import enable_packing as enable_packing
from ..packs.loss import distillation_loss as distillation_loss
from ..packs.loss import model_inputs as model_inputs
from ..packs.loss import summed_loss as summed_loss
from ..packs.loss import summed_losses as summed_losses
from ..packs.offload import offload_checkpoints as offload_checkpoints

__all__: list[str]
