"""Small models with random weights, and their microbatches, for tests of the engine."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tests.support.families import FAMILIES, SIZES, causal_lm, wide


@dataclass(frozen=True)
class Case:
    """`build()` makes the model, `batch(generator, n)` one microbatch of size n; `loss` is a *sum* over samples."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple]
    loss: Callable[[nn.Module, tuple], torch.Tensor]
    count: Callable[[tuple], int]


def _token_batch(generator: torch.Generator, size: int) -> tuple:
    return (torch.randint(3, 97, (1, size + 1), generator=generator),)


def _token_loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    (ids,) = batch
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _lm(make: Callable[..., nn.Module], *args: object, **changes: object) -> Case:
    return Case(
        build=functools.partial(make, *args, **changes),
        batch=_token_batch,
        loss=_token_loss,
        count=lambda batch: batch[0].numel() - 1,
    )


class ConvNet(nn.Module):
    """Convolutions, BatchNorm's buffers, a transposed view, a scalar, fewer rows than ranks, an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.conv2 = nn.Conv2d(6, 5, 3, stride=2, bias=False)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.one_row = nn.Parameter(torch.randn(1, 5))
        self.head = nn.Linear(5, 3)
        self.register_buffer("offset", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.conv1(x + self.offset)))
        x = self.conv2(x).mean((2, 3)) * self.one_row + self.empty.sum()
        return self.head(x) * self.temperature


def _image_batch(generator: torch.Generator, size: int) -> tuple:
    images = torch.randn(size, 1, 8, 8, generator=generator)
    return images, torch.randint(0, 3, (size,), generator=generator)


def _image_loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"} | {"num_labels": 3}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes | dropouts)).train()


def _padded_batch(generator: torch.Generator, size: int) -> tuple:
    ids = torch.randint(3, 97, (1 + size % 3, size + 2), generator=generator)
    ids[0, size:] = 0
    return ids, torch.randint(0, 3, (len(ids),), generator=generator)


def _class_loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    logits = model(input_ids=batch[0], attention_mask=(batch[0] != 0).long()).logits
    return nn.functional.cross_entropy(logits, batch[1], reduction="sum")


CASES = {
    "qwen2": _lm(causal_lm, "Qwen2"),
    "llama": _lm(causal_lm, "Llama"),
    "qwen3": _lm(causal_lm, "Qwen3"),
    "gpt2-tied": _lm(causal_lm, "GPT2"),
    "qwen3-moe": _lm(causal_lm, "Qwen3Moe", num_experts=4, mlp_only_layers=[], head_dim=8),
    "conv": Case(build=ConvNet, batch=_image_batch, loss=_image_loss, count=lambda batch: len(batch[0])),
}
MIXTURES = {
    "mixtral": _lm(causal_lm, "Mixtral"),
    "qwen3-moe-dense": _lm(causal_lm, "Qwen3Moe", head_dim=8),
    "gpt-oss": _lm(causal_lm, "GptOss", head_dim=8),
    "deepseek-v3": _lm(causal_lm, "DeepseekV3"),
}
OTHERS = {name: _lm(wide, name) for name in FAMILIES} | {
    "bert": Case(build=_classifier, batch=_padded_batch, loss=_class_loss, count=lambda batch: len(batch[1]))
}
ALL_CASES = CASES | MIXTURES | OTHERS


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ALL_CASES[name].build()


def tie_in_config(folder: Path) -> None:
    """The folder's config ties head and embedding, of which its files have different values: they stay apart."""
    config = json.loads((folder / "config.json").read_text())
    assert not config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))


def microbatches(name: str, sizes: list[int], seed: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(seed)
    return [ALL_CASES[name].batch(generator, size) for size in sizes]
