"""No host waits for its device inside a microbatch: counted on the CPU, where CUDA's ways are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import MixedPrecisionPolicy, fully_shard, minibatch
from odc_triton.engine.exact import ExactSums
from odc_triton.hf import enable_packing, summed_losses
from odc_triton.nn.replace import replace_layers
from odc_triton.packs.collate import count_target_tokens, pack_collate, to_device
from tests.support import ranks
from tests.support.host_waits import HostWaits
from tests.support.models import build
from tests.support.parity import TRANSFORMS

LAYERS = ("attention", "embedding", "linear")
# What only the CPU does, at which nothing can wait there: places, and why.
ON_THE_CPU_ONLY = {
    "functional/embedding.py": "rows are summed by plain torch; on CUDA a kernel does it, as shards take kernels only",
    "functional/log_probs.py": "targets are checked; on CUDA a wrong one gives NaN",
}
_PACKS = [(7, 1, 12), (5,), (3, 3, 3, 3), (2, 18)]


def _packs(lengths: list[tuple[int, ...]]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    return pack_collate(
        [[{"input_ids": torch.randint(3, 97, (length,), generator=generator)} for length in pack] for pack in lengths]
    )


def _microbatches(model: nn.Module, packs: list[dict[str, Any]]) -> dict[str, int]:
    """What would wait in each forward and backward of a minibatch, all together."""
    with minibatch(model, tokens=count_target_tokens(packs)) as mb:
        here = [to_device(pack, "cpu") for pack in packs]
        with HostWaits(model) as waits:
            for pack in here:
                loss, router = summed_losses(model, pack)
                (loss / mb.tokens + router).backward()
    return dict(waits.found)


def _counted(
    rank: int, world: int, name: str, roles: tuple[str, ...], change: str, bf16: bool, choice: str
) -> dict[str, int]:
    model = build(name)
    if name == "Qwen3Moe":
        model.config.output_router_logits = True
    enable_packing(model)
    if roles:
        replace_layers(model, roles=roles, choice=choice, verbose=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else None
    model = fully_shard(TRANSFORMS[change](model), backend="cpu-sharded", mp_policy=policy)
    _microbatches(model, _packs([(2,)]))  # makes tables of addresses, once
    return _microbatches(model, _packs(_PACKS[rank:]))


CASES = [
    *((name, (), "none", False, "auto") for name in ("GPT2", "Qwen3Moe")),
    ("Qwen2", (), "checkpointing", True, "auto"),
    ("Qwen3", (*LAYERS, "head"), "none", False, "auto"),
    ("Qwen2", LAYERS, "none", False, "qkv=triton/gathered"),
    ("Llama", (*LAYERS, "head"), "checkpointing", True, "auto"),
]


def test_nothing_waits() -> None:
    for case, of_ranks in zip(CASES, ranks.run_all(2, *((_counted, *case) for case in CASES)), strict=True):
        for found in of_ranks:
            waits = {what for what in found if what.partition(" at ")[2].partition(":")[0] not in ON_THE_CPU_ONLY}
            assert not waits, case
            assert bool(found) == bool(case[1]), "what only the CPU does is seen"


@pytest.mark.parametrize("layers", [1, 3])
def test_exact_sums_wait_once_for_all_parameters(layers: int) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
    fully_shard(model, backend="cpu-sharded", exact=True)
    with minibatch(model):
        for parameter in model._odc_engine.parameters:
            parameter.shard.touched = True
        with HostWaits(model) as waits:
            added = model._odc_engine.participant(ExactSums).exit()
    assert len(added) == 2 * layers
    assert sum(waits.found.values()) == 1
