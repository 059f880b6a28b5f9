"""torchtitan's Trainer, by on-demand communication: docs/recipes.md"""

from typing import Any

from torch import Tensor
from torchtitan.trainer import Trainer

from odc_triton import begin_minibatch, end_minibatch, use_odc


class TrainerByOdc(Trainer):
    """`dataloader.microbatches(step)`: how many this rank has in it, at least one."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        use_odc(self.model_parts[0])

    def train_step(self, data_iterator: Any) -> None:
        self.gradient_accumulation_steps = self.dataloader.microbatches(self.step)
        self.to_do = self.gradient_accumulation_steps
        super().train_step(data_iterator)

    def forward_backward_step(self, **microbatch: Any) -> Tensor:
        if self.to_do == self.gradient_accumulation_steps:
            begin_minibatch(self.model_parts[0])
        loss = super().forward_backward_step(**microbatch)
        self.to_do -= 1
        if not self.to_do:
            end_minibatch(self.model_parts[0])
        return loss
