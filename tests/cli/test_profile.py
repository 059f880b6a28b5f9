"""Where time goes: the sums by brute force, and a real run of the command."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from odc_triton.jobs.reports.trace import (
    _OUR_CATEGORIES,
    ACCUMULATE,
    ATTENTION,
    BARRIERS,
    GATHER,
    IDLE,
    KERNELS,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    category_of_kernel,
    category_of_operator,
)
from odc_triton.tools.cli.command import main
from odc_triton.tools.profile import ProfileOptions, _names_of_our_kernels, _prepare
from tests.support import ranks as test_ranks
from tests.support.families import SIZES

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | SIZES
CONFIG |= {"vocab_size": 128, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}


def _call(rank: int, world: int, function: Callable, *args: Any) -> Any:
    return function(*args)


def launch_among_tests(function: Callable, *args: Any, ranks: int) -> list[Any]:
    """`launch`, by processes that need not import torch first."""
    return test_ranks.run(_call, ranks, function, *args)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("aten::mm", PRODUCTS),
        ("aten::_grouped_mm", PRODUCTS),
        ("mkldnn::_linear_pointwise", None),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", ATTENTION),
        ("odc::linear_grad", KERNELS),
        ("odc.accumulate", ACCUMULATE),
        ("odc.gather", GATHER),
        ("Optimizer.step#AdamW.step", OPTIMIZER),
    ],
)
def test_operators(name: str, category: str | None) -> None:
    assert category_of_operator(name) == category


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN", PRODUCTS),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", ATTENTION),
        ("wgrad_kernel", KERNELS),
        ("scatter_kernel", ACCUMULATE),
        ("Memcpy PtoP (Device -> Device)", GATHER),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", OPTIMIZER),
        ("void at::native::vectorized_elementwise_kernel<4>", OTHER),
    ],
)
def test_kernels(name: str, category: str) -> None:
    assert category_of_kernel(name, frozenset({"wgrad_kernel", "scatter_kernel"})) == category


def test_every_kernel_is_known() -> None:
    """By the names of jit functions, which are those on a device's timeline."""
    folder = Path(_names_of_our_kernels.__globals__["__file__"]).parents[2] / "kernels"
    text = "".join(path.read_text() for path in folder.glob("*.py"))
    launched = set(re.findall(r"\b(\w+_kernel)\[", text))
    assert len(launched) >= 15
    ours = _names_of_our_kernels()
    assert launched <= ours
    assert set(_OUR_CATEGORIES) <= ours
    assert {name for name in ours if category_of_kernel(name, ours) == BARRIERS} == {
        "set_flags_kernel",
        "await_flags_kernel",
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "either --model"),
        ({"init": "a", "minibatches": 0}, "minibatches is 0"),
        ({"init": "a", "token_cap": 1}, "--token-cap is 1"),
        ({"init": __file__, "out": f"{__file__}/new"}, r"and .*test_profile\.py is a file: give a folder"),
    ],
)
def test_bad_options(changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProfileOptions(**{"out": "x"} | changes)


def _samples(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    _, minibatches = _prepare(ProfileOptions(**options))
    return [packs.samples for packs in minibatches]


def test_packs_know_the_samples_of_all_ranks(tmp_path: Path) -> None:
    """As a router's auxiliary loss needs, which a config has after `train sft --router-aux-loss`."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = {"init": str(tmp_path), "out": str(tmp_path / "out"), "token_cap": 8, "samples_per_rank": 2}
    assert test_ranks.run(_samples, 2, given | {"minibatches": 1}) == [[4, 4]] * 2


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc_triton.jobs.launcher.launch.launch", launch_among_tests)
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    config, lengths, out = tmp_path / "config.json", tmp_path / "lengths.txt", tmp_path / "out"
    config.write_text(json.dumps(CONFIG))
    lengths.write_text("9\n33\n64\n5\n")
    given = ["profile", "--init", str(config), "--lengths", str(lengths), "--out", str(out), "--ranks", "2"]
    assert main([*given, "--token-cap", "64", "--minibatches", "2", "--replace-layers"]) == 0
    printed, said = capfd.readouterr()
    assert "profiler_start" not in said
    assert "matrix products" in printed
    assert "barriers" in printed
    report = json.loads((out / "profile.json").read_text())
    assert len(report["ranks"]) == 2
    for of_rank in report["ranks"]:
        assert sum(of_rank["seconds"].values()) == pytest.approx(of_rank["wall_s"])  # every moment once
        for category in (PRODUCTS, ATTENTION, KERNELS, OTHER, OPTIMIZER, ACCUMULATE, BARRIERS):
            assert of_rank["seconds"][category] > 0, category
        assert of_rank["seconds"][IDLE] < of_rank["wall_s"]
    tokens = 4 * (9 + 33 + 64 + 5)  # 2 minibatches of 8
    assert sum(of_rank["tokens"] for of_rank in report["ranks"]) == tokens
    assert report["tokens_per_s"] == tokens / max(of_rank["wall_s"] for of_rank in report["ranks"])
    assert f"{tokens} tokens in " in printed
    for name in ("timeline.png", "trace.json", "torch-0.json", "torch-1.json"):
        assert (out / name).stat().st_size > 0
