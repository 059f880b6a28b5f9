"""CostModel: its formula against a count over a real model's weights, its fit against known coefficients."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

from odc_triton.balance import CostModel


def test_a_pack_costs_the_sum_of_its_documents_and_not_the_square_of_its_tokens():
    cost = CostModel(quadratic=2.0, linear=3.0, microbatch=5.0)
    assert cost.sequence(10) == 2 * 100 + 3 * 10
    assert cost.pack([10, 4]) == 5 + (200 + 30) + (32 + 12)


def test_the_papers_model_at_32000_tokens():
    assert CostModel.paper_7b().sequence(32000) == pytest.approx(4.348 + 8.768)


def test_flops_match_a_count_over_a_models_weights():
    """6 FLOPs per token and weight of a matrix that multiplies, counted from the built model."""
    transformers = pytest.importorskip("transformers")
    import torch

    config = transformers.Qwen2Config(
        hidden_size=48,
        num_hidden_layers=3,
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=101,
    )
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    cost = CostModel.from_config(config)
    assert cost.linear == 6 * weights
    # Causal attention pair by pair: token t looks at t + 1 keys, in two products of 2 FLOPs a channel.
    tokens = 200
    pairs = sum(t + 1 for t in range(tokens))
    flops = 3 * 3 * pairs * 2 * 2 * 48
    assert cost.quadratic * tokens**2 == pytest.approx(flops, rel=1 / tokens)


def test_config_attributes_that_may_be_missing_and_experts():
    full = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 128,
        "vocab_size": 50,
    }
    few = {k: full[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    assert CostModel.from_config(SimpleNamespace(**few)) == CostModel.from_config(SimpleNamespace(**full))
    dense = CostModel.from_config(SimpleNamespace(**full))
    experts = CostModel.from_config(SimpleNamespace(**full, num_experts_per_tok=2))
    assert experts.linear - dense.linear == 6 * 2 * 3 * 32 * 128
    plain = CostModel.from_config(SimpleNamespace(**full), gated_mlp=False)
    assert dense.linear - plain.linear == 6 * 2 * 32 * 128
    wide = CostModel.from_config(SimpleNamespace(**{**full, "head_dim": 16}))
    assert wide.quadratic == 2 * dense.quadratic


def test_a_config_without_sizes_is_refused_by_the_attributes_name():
    with pytest.raises(
        ValueError, match="config has hidden_size=None, which its cost depends on: give the config of a text"
    ):
        CostModel.from_config(SimpleNamespace(text_config=SimpleNamespace(hidden_size=8)))


@pytest.mark.parametrize(
    "true",
    [
        CostModel(quadratic=3e-10, linear=2e-6),
        CostModel(quadratic=0.0, linear=2e-6),
        CostModel(quadratic=3e-10, linear=0.0),
        CostModel(quadratic=3e-10, linear=2e-6, microbatch=0.01),
    ],
)
def test_fit_finds_the_coefficients_of_exact_times(true):
    packs = [[100], [4000, 50], [32000], [700, 800, 900], [16000, 16000]]
    fit = CostModel.fit(packs, [true.pack(p) for p in packs], microbatch=true.microbatch > 0)
    assert (fit.quadratic, fit.linear, fit.microbatch) == pytest.approx(
        (true.quadratic, true.linear, true.microbatch), rel=1e-6, abs=1e-16
    )


def test_fit_is_the_least_error_among_nonnegative_coefficients():
    """Noisy times whose free least squares has a negative coefficient; the oracle is a grid."""
    rng = random.Random(3)
    lengths = [50 * (i + 1) for i in range(12)]
    seconds = [s * (1 - 2e-4 * s) + rng.uniform(0, 20) for s in lengths]
    free = np.linalg.lstsq(np.array([[s * s, s] for s in lengths], float), np.array(seconds), rcond=None)[0]
    assert free.min() < 0

    def error(quadratic: float, linear: float) -> float:
        return sum(((quadratic * s + linear) * s - t) ** 2 for s, t in zip(lengths, seconds, strict=True))

    fit = CostModel.fit(lengths, seconds)
    assert fit.quadratic == 0
    grid = itertools.product(np.linspace(0, 1e-3, 21), np.linspace(0, 2 * fit.linear, 42))
    assert error(fit.quadratic, fit.linear) <= min(error(*point) for point in grid)


@pytest.mark.parametrize(
    ("lengths", "seconds", "message"),
    [
        ([10, 20], [1.0], "2 lengths but 1 times"),
        ([10, 10], [1.0, 1.1], "1 distinct lengths for 2 coefficients"),
        ([10, 0], [1.0, 1.0], r"lengths\[1\] is \[0\]"),
        ([10, []], [1.0, 1.0], r"lengths\[1\] is \[\]"),
        ([10, 20], [1.0, float("nan")], r"seconds\[1\] is nan"),
        ([10, 20], [1.0, 0.0], r"seconds\[1\] is 0.0"),
    ],
)
def test_fit_refuses(lengths, seconds, message):
    with pytest.raises(ValueError, match=message):
        CostModel.fit(lengths, seconds)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"quadratic": -1.0, "linear": 1.0}, "quadratic is -1.0"),
        ({"quadratic": 1.0, "linear": float("inf")}, "linear is inf"),
        ({"quadratic": 0.0, "linear": 0.0}, "costs nothing"),
        ({"quadratic": 1.0, "linear": 1.0, "microbatch": -2.0}, "microbatch is -2.0"),
    ],
)
def test_coefficients_out_of_range_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CostModel(**kwargs)
