"""Sampling from models with recurrent layers: prompts of other lengths beside one change none of its probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import fully_shard
from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.transformers_engine import TransformersEngine
from odc_triton.packs.padding import padding_leaks
from tests.support import ranks
from tests.support.hybrids import hybrid
from tests.support.sampling import log_probabilities

# Of tests/support/hybrids.py, what is changed of it, and whether a projection before a convolution has a bias.
FAST = [("qwen3_5", {}, False), ("nemotron_h, experts", {"use_bias": True, "mamba_proj_bias": True}, True)]
BIASES = dict.fromkeys(("granitemoehybrid", "falcon_h1", "bamba"), "mamba_proj_bias") | {"zamba2": "add_bias_linear"}
BIASES |= dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), "conv_bias")
NONE = ("qwen3_next", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid", "nemotron_h, experts")
SLOW = [(name, {}, False) for name in NONE]
SLOW += [(name, {biased: leaks}, leaks) for leaks in (False, True) for name, biased in BIASES.items()]
PROMPTS = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 9, 17, 1, 9)]


def _model(name: str, changes: dict[str, Any]) -> nn.Module:
    """Random, with biases, and states that last and matter."""
    model = hybrid(name, dtype=torch.float32, **changes).eval()
    model.get_output_embeddings().weight.data.mul_(3)
    return model


def _sampled(model: nn.Module) -> list[list[Sampled]]:
    requests = [Request(ids=ids, seeds=[1, 2]) for ids in PROMPTS]
    options = SamplingOptions(temperature=0.8, max_new_tokens=16, end_tokens=(5, 6))
    return TransformersEngine(model).generate(requests, options)


def _assert_the_models(model: nn.Module, made: list[list[Sampled]]) -> None:
    for ids, group in zip(PROMPTS, made, strict=True):
        for sampled in group:
            want = log_probabilities(model, ids, sampled.ids, 0.8)
            torch.testing.assert_close(torch.tensor(sampled.logps), want, rtol=0, atol=1e-4)
    # The state matters: the first token reaches the last.
    first, *others = PROMPTS[2]
    one, other = (log_probabilities(model, [each, *others], [1] * 16, 0.8)[-8:] for each in (first, 63 - first))
    assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "changes", "leaks"), [*FAST, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_log_probabilities_are_those_of_the_prompt_alone(name: str, changes: dict[str, Any], leaks: bool) -> None:
    model = _model(name, changes)
    assert padding_leaks(model) == leaks
    _assert_the_models(model, _sampled(model))


def _sharded(rank: int, world: int, row: int) -> list[list[Sampled]]:
    return _sampled(fully_shard(_model(*FAST[row][:2])))


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(FAST)))
def test_of_a_sharded_model(row: int) -> None:
    for made in ranks.run(_sharded, 2, row):
        _assert_the_models(_model(*FAST[row][:2]), made)
