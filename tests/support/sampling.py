"""What plain transformers samples greedily, and how likely a completion is."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def greedy(model: nn.Module, prompt: list[int], tokens: int) -> list[int]:
    """The next tokens by plain transformers."""
    ids = torch.tensor([prompt])
    for _ in range(tokens):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, len(prompt) :].tolist()


@torch.no_grad()
def log_probabilities(model: nn.Module, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    """Of each token of the completion."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    every = (logits.float() / temperature).log_softmax(-1)
    return every.gather(1, torch.tensor(completion)[:, None])[:, 0]
