"""Lightning's Trainer: torchrun … lightning_trainer.py OPTIMIZER MODEL OUT [CHECKPOINT]. It goes on from CHECKPOINT."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

OPTIMIZERS = {
    "sgd": (torch.float64, lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "adamw": (torch.float32, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)),
}
optimizer, pretrained, out, *checkpoint = sys.argv[1:]
dtype, make_optimizer = OPTIMIZERS[optimizer]


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)

    def configure_model(self) -> None:
        if not isinstance(self.model, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = make_optimizer(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


trainer = lightning.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    max_epochs=2,  # of three steps
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    val_check_interval=3,  # in the middle of a step
    callbacks=[ModelCheckpoint(out, filename="{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
)
module = Module()
data = torch.randint(0, 97, (24, 20), generator=torch.Generator().manual_seed(0))
loaders = DataLoader(data, batch_size=2), DataLoader(data[:8], batch_size=2)
trainer.fit(module, *loaders, ckpt_path=checkpoint[0] if checkpoint else None)
print(f"{trainer.global_step} steps, {trainer.callback_metrics}, lr {trainer.optimizers[0].param_groups[0]['lr']}")
weights = get_model_state_dict(module.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if trainer.is_global_zero:
    module.model.save_pretrained(out, state_dict=weights)
