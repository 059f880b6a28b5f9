"""torchtitan's Trainer with its small Llama on CPUs. It runs on GPUs only: `as_cpu` says what a CPU lacks for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "out" / "torchtitan-0.3.0"  # made by `make test-slow`
STEPS = ([[30, 7, 19], [64]], [[12], [25, 9]], [[41, 8], [5]])  # by step, the lengths of each rank's microbatches
_VOCABULARY = 2048


def as_cpu() -> None:
    """Makes torchtitan importable, and CPUs its devices."""
    sys.path.insert(0, str(FOLDER))
    from torchtitan.tools import utils

    nothing = dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache"), lambda *_: None)
    memory = {"get_device_properties": lambda _: SimpleNamespace(total_memory=1 << 30), "memory_stats": lambda _: {}}
    names = {"device_count": lambda: 1, "current_device": lambda: 0, "get_device_name": lambda _: "CPU"}
    utils.device_type, utils.device_module = "cpu", SimpleNamespace(**nothing, **memory, **names)
    from torchtitan.distributed import utils as distributed  # it takes the device from `utils`

    distributed.set_pg_timeouts = lambda **_: None  # torch 2.13 has no torch.distributed.set_timeout


def _microbatch(step: int, rank: int, at: int, length: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids = torch.randint(
        _VOCABULARY, (1, length + 1), generator=torch.Generator().manual_seed(100 * step + 10 * rank + at)
    )
    return {"input": ids[:, :-1]}, ids[:, 1:]


def config_of(ranks_here: tuple[int, ...]) -> Any:
    """Of a trainer whose process has the microbatches of these ranks."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry
    from torchtitan.trainer import Trainer

    class Loader(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            pass

        def microbatches(self, step: int) -> int:
            return sum(len(STEPS[step - 1][rank]) for rank in ranks_here)

        def __iter__(self) -> Iterator[Any]:
            for step, by_rank in enumerate(STEPS):
                for rank in ranks_here:
                    for at, length in enumerate(by_rank[rank]):
                        yield _microbatch(step, rank, at, length)

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *_: Any, **__: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            return _VOCABULARY

    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=1e-3, eps=1e-4),  # else AdamW amplifies rounding where a gradient is near zero
        loss=CrossEntropyLoss.Config(),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        training=TrainingConfig(
            local_batch_size=1, seq_len=64, steps=len(STEPS), disable_cuda_graphs=True, mixed_precision_param="float32"
        ),
        activation_checkpoint=None,
    )


def train(trainer: Any) -> dict[str, torch.Tensor]:
    """The whole parameters after all steps, from values that don't depend on the number of ranks."""
    from torch.distributed.tensor import distribute_tensor

    (model,) = trainer.model_parts
    for at, parameter in enumerate(model.parameters()):
        random = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(at))
        value = 1 + 0.1 * random if parameter.ndim == 1 else random / parameter.shape[-1] ** 0.5
        with torch.no_grad():
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))
    trainer.train()
    trainer.close()
    return {name: value.full_tensor().detach() for name, value in model.named_parameters()}
