"""CostModel: its formula, and what of a config it needs. tests/simulate/test_models.py has torch's count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from odc_triton.balance import CostModel
from odc_triton.plan.cost import attention_factor


def test_a_pack_costs_the_sum_of_its_documents_and_not_the_square_of_its_tokens():
    cost = CostModel(quadratic=2.0, linear=3.0, microbatch=5.0)
    assert cost.sequence(10) == 2 * 100 + 3 * 10
    assert cost.pack([10, 4]) == 5 + (200 + 30) + (32 + 12)


@pytest.mark.parametrize("quadratic", [0.0, 0.02])
def test_tokens_without_a_target_cost_no_head_and_reach_inverts_segment(quadratic: float) -> None:
    cost = CostModel(quadratic=quadratic, linear=3.0, head=2.0)
    assert cost.segment(4, 10, 7) == pytest.approx(quadratic * (100 - 16) + 3 * 6 - 2 * 3)
    for start, learned in ((0, 0), (0, 30), (20, 30), (40, 30)):
        for stop in (start, start + 5, start + 25):
            assert cost.reach(start, cost.segment(start, stop, learned), learned) == pytest.approx(stop)
    with pytest.raises(ValueError, match=r"CostModel.head is 3.0, of linear 3.0"):
        CostModel(quadratic=0.0, linear=3.0, head=3.0)


def test_the_time_of_attention_beside_that_of_linear_layers():
    """By made-up times: the longest counts most, and up to 5% is nothing."""
    linear = [(1e9, 0.01), (4e9, 0.04)]
    assert attention_factor([(1e9, 0.02), (4e9, 0.08)], linear) == pytest.approx(2)
    assert attention_factor([(1e7, 0.01), (4e9, 0.06)], linear) == pytest.approx(1.5, rel=1e-2)
    assert [attention_factor([(1e9, 0.01 * much)], linear) for much in (0.96, 1.04)] == [1.0, 1.0]
    assert attention_factor([(1e9, 0.0094)], linear) == pytest.approx(0.94)
    for seconds in (0.0, float("nan")):
        with pytest.raises(ValueError, match="they must be positive"):
            attention_factor([(1e9, seconds)], linear)
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    by_flops, measured = CostModel.from_config(config), CostModel.from_config(config, attention=1.5)
    assert (measured.quadratic, measured.linear) == (1.5 * by_flops.quadratic, by_flops.linear)


def test_the_papers_model_at_32000_tokens():
    assert CostModel.paper_7b().sequence(32000) == pytest.approx(4.348 + 8.768)


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
    wide = CostModel.from_config(SimpleNamespace(**{**full, "head_dim": 16}))
    assert wide.quadratic == 2 * dense.quadratic
    # Gemma 3n's widths are a list, and what Gemma 4's layers differ in it refuses to say of them all.
    assert CostModel.from_config(SimpleNamespace(**{**full, "intermediate_size": [96, 160]})) == dense
    layers = {"per_layer_config": [SimpleNamespace(head_dim=width) for width in (8, 24)]}
    differing = SimpleNamespace(**full, **layers, per_layer_attributes={"head_dim"})
    assert CostModel.from_config(differing) == wide


def test_a_config_without_sizes_is_refused_by_the_attributes_name():
    with pytest.raises(
        ValueError, match="config has hidden_size=None, which its cost depends on: give a config that sets"
    ):
        CostModel.from_config(SimpleNamespace(text_config=SimpleNamespace(hidden_size=8)))


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
