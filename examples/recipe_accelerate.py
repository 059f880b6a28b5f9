"""accelerate's FSDP2 on samples with and without images: docs/recipes.md"""

from collections.abc import Iterable

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn
from torch.optim import Optimizer

from odc_triton import minibatch, use_odc
from odc_triton.balance import count_target_tokens, pack_collate, to_device
from odc_triton.hf import summed_loss


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[list]) -> nn.Module:
    """`steps`: by step, this rank's samples. Any number, with images or without."""
    units = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**units))
    model, optimizer = accelerator.prepare(model, optimizer)
    use_odc(model)
    for samples in steps:
        packs = pack_collate([[sample] for sample in samples])
        with minibatch(model, tokens=count_target_tokens(packs)) as mb:
            for pack in packs:
                loss = summed_loss(model, to_device(pack, accelerator.device))
                accelerator.backward(loss / mb.tokens)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model
