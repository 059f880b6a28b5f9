"""Importance weights against the lines of TRL that compute them, run on padded rows."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from odc_triton.jobs.rl.importance import Importance
from odc_triton.jobs.train.grpo_options import GrpoOptions

LENGTHS = torch.tensor([5, 1, 0, 7, 3, 6])


def _logps(spread: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    policy = -torch.rand(int(LENGTHS.sum()), generator=generator) * 3
    sampler = policy + torch.randn(len(policy), generator=generator) * spread
    sampler[4] = sampler[9] = math.nan
    return policy, sampler


def _padded(values: torch.Tensor) -> torch.Tensor:
    rows = torch.full((len(LENGTHS), int(LENGTHS.max())), -7.0)  # padding that would show
    for row, part in zip(rows, values.split(LENGTHS.tolist()), strict=True):
        row[: len(part)] = part
    return rows


def _trls(mode: str, most: float) -> torch.Tensor:
    """The ratios by TRL's own lines: they stand in the middle of a method of its trainer."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    source = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "torch.exp(logps_diff)" in ast.unparse(node)
    ]
    if len(blocks) != 1:
        pytest.fail(f"TRL {importlib.metadata.version('trl')} has its lines elsewhere than 1.16, which the extra pins")
    policy, sampler = _logps()
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=most,
        vllm_importance_sampling_clip_min=None,
    )
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).long(),
        "old_per_token_logps": _padded(policy),
        "sampling_per_token_logps": _padded(sampler),
    }
    exec(compile(ast.Module(body=blocks, type_ignores=[]), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("most", [1.1, 3.0])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_as_trl(mode: str, most: float) -> None:
    mask = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
    want = _trls(mode, most).expand(mask.shape)[mask]
    importance, (policy, sampler) = Importance(mode=mode, most=most), _logps()
    log_ratios = (policy - sampler).nan_to_num(0.0)
    if importance.is_of_sequences:
        sums = [part.sum().expand(len(part)) for part in log_ratios.split(LENGTHS.tolist())]
        log_ratios = torch.cat(sums)
    got = importance.weights(log_ratios)
    # Sums of up to 7 numbers in another order.
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert len(got.unique()) > 2


def test_defaults_are_trls() -> None:
    trl = pytest.importorskip("trl.trainer.grpo_config")
    theirs = {each.name: each.default for each in fields(trl.GRPOConfig)}
    ours = {each.name: each.default for each in fields(GrpoOptions)}
    assert ours["importance"] == theirs["vllm_importance_sampling_mode"]
    assert ours["importance_cap"] == theirs["vllm_importance_sampling_clip_max"]
