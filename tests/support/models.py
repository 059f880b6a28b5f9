"""Small models with random weights, and their microbatches, for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2_SIZES = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
GPT2_SIZES |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Case:
    """`build()` makes the model, `batch(generator, n)` one microbatch of size n; `loss` is a *sum* over samples."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], tuple]
    loss: Callable[[nn.Module, tuple], torch.Tensor]
    count: Callable[[tuple], int]


def _causal_lm(name: str, **overrides: object) -> nn.Module:
    import transformers

    sizes = GPT2_SIZES if name == "GPT2" else SIZES
    config = getattr(transformers, f"{name}Config")(**sizes | overrides)
    model = getattr(transformers, f"{name}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")(config)
    model.config._attn_implementation = "eager"
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):  # DeepSeek's routers choose by it; zeros would not show its loss
            buffer.uniform_()
    return model


def _token_batch(generator: torch.Generator, size: int) -> tuple:
    return (torch.randint(3, 97, (1, size + 1), generator=generator),)


def _token_loss(model: nn.Module, batch: tuple) -> torch.Tensor:
    (ids,) = batch
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _lm(name: str, **overrides: object) -> Case:
    return Case(
        build=lambda: _causal_lm(name, **overrides),
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


CASES = {
    "qwen2": _lm("Qwen2"),
    "llama": _lm("Llama"),
    "qwen3": _lm("Qwen3", head_dim=16),
    "gpt2-tied": _lm("GPT2"),
    "qwen3-moe": _lm("Qwen3Moe", moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8),
    "conv": Case(build=ConvNet, batch=_image_batch, loss=_image_loss, count=lambda batch: len(batch[0])),
}

# Mixtures of experts. Five experts don't divide evenly by two ranks; a layer without experts where the family has some.
MIXTURE_SIZES: dict[str, tuple[str, dict[str, object]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6, "head_dim": 8}),
    "qwen3-moe-dense": (
        "Qwen3Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_only_layers": [0],
            "head_dim": 8,
        },
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 6, "head_dim": 8}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 10,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
}
MIXTURES = {name: _lm(family, **sizes) for name, (family, sizes) in MIXTURE_SIZES.items()}
ALL_CASES = CASES | MIXTURES


def build(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return ALL_CASES[name].build()


def microbatches(name: str, sizes: list[int], seed: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(seed)
    return [ALL_CASES[name].batch(generator, size) for size in sizes]
