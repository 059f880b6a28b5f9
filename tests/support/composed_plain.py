"""What `composed.py` trains on ranks, by plain torch in one process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from odc_triton.balance import MinibatchSampler
from odc_triton.jobs.train.model import add_adapters
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support.composed import PER_STEP, STEPS, Trained, Weights, model_of, options_of, samples_of, whole
from tests.support.table_composes import CAP

ARITHMETIC = ("LoRA", "one base", "Muon", "bf16", "hybrid")  # the features that change what is computed


def plain_model(folder: Path, features: tuple[str, ...]) -> nn.Module:
    """In training mode; with PEFT's adapters for "LoRA"."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_of(folder, features), dtype=torch.float32, attn_implementation="sdpa"
    )
    if {"LoRA", "one base"} & {*features}:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an old name in transformers
            model = add_adapters(model, rank=4, alpha=None, targets="all-linear")
    return model.train()


def by_plain_torch(folder: Path, features: tuple[str, ...], start: Weights) -> Trained:
    """From the parameters `start`, one sample after another: AdamW, or torch's Muon; for "bf16" a copy of the model
    in bf16 computes, and gradients are summed in fp32.
    """
    torch.set_num_threads(1)
    options = options_of(folder, features, world=1, out=folder)
    model, data, found = plain_model(folder, features), samples_of(folder), Trained(start=start)
    assert start.keys() == dict(model.named_parameters()).keys()
    model.load_state_dict(start, strict=False)  # without the names of tied weights and buffers
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizers = _optimizers(trained, options)
    sampler = MinibatchSampler(data.lengths.tolist(), PER_STEP, CAP, rank=0, world=1, drop_last=True)
    for _, dealt in zip(range(STEPS), sampler, strict=False):
        indices = [sample for pack in dealt for sample in pack]
        tokens = int(data.target_counts[indices].sum())
        computes, total = _in_bf16(model) if "bf16" in features else model, 0.0
        named = dict(computes.named_parameters())
        for parameter in trained.values():
            parameter.grad = torch.zeros_like(parameter)
        for index in indices:
            sample = data[index]
            ids, labels = (torch.from_numpy(sample[name]).long() for name in ("input_ids", "labels"))
            logits = computes(input_ids=ids[None], use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits.float(), labels[1:], ignore_index=-100, reduction="sum") / tokens
            for name, gradient in zip(
                trained, torch.autograd.grad(loss, [named[name] for name in trained]), strict=True
            ):
                trained[name].grad += gradient.float()
            total += loss.item()
        found.losses.append(total)
        found.norms.append(nn.utils.clip_grad_norm_(trained.values(), options.clip_norm).item())
        for optimizer in optimizers:
            optimizer.step()
    found.end = whole(model)
    return found


def _in_bf16(model: nn.Module) -> nn.Module:
    """A copy with parameters in bf16; buffers, such as rotary frequencies, keep their dtype."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def _optimizers(trained: Weights, options: SftOptions) -> list[torch.optim.Optimizer]:
    """As `--optimizer` says: Muon takes the matrices of the blocks."""
    by_muon = {name for name, parameter in trained.items() if parameter.ndim == 2 and ".layers." in name}
    by_muon = by_muon if options.optimizer == "muon" else set()
    others = [parameter for name, parameter in trained.items() if name not in by_muon]
    how = {"lr": options.lr, "weight_decay": options.weight_decay}
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(others, **how)] if others else []
    if by_muon:
        matrices = [trained[name] for name in trained if name in by_muon]
        made.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **how))
    return made
