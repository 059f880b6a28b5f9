"""Importance weights against the lines of TRL that compute them, run on padded rows."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from odc_triton.rl.importance import ImportanceOptions, importance_weights

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


def _trls(options: ImportanceOptions) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """(ratios, what is logged), by TRL's own lines: they stand in the middle of a method of its trainer."""
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    source = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and ("torch.exp(logps_diff)" in ast.unparse(node) or "sampling_logp_difference" in ast.unparse(node))
    ]
    if len(blocks) != 2:
        pytest.fail(f"TRL {importlib.metadata.version('trl')} has its lines elsewhere than 1.16, which the extra pins")
    policy, sampler = _logps()
    metrics: dict[str, list[float]] = defaultdict(list)
    trainer = SimpleNamespace(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=options.mode,
        vllm_importance_sampling_clip_max=options.most,
        vllm_importance_sampling_clip_min=options.least,
        accelerator=SimpleNamespace(gather=lambda value: value.reshape(-1)),
        _metrics={"train": metrics},
    )
    names = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "mode": "train",
        "device": "cpu",
        "tool_mask": None,
        "completion_mask": (torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]).long(),
        "old_per_token_logps": _padded(policy),
        "sampling_per_token_logps": _padded(sampler),
        "nanmin": torch.min,
        "nanmax": torch.max,
    }
    exec(compile(ast.Module(body=sorted(blocks, key=lambda node: node.lineno), type_ignores=[]), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"], metrics


@pytest.mark.parametrize("bounds", [(None, 3.0), (0.6, 1.5), (0.8, None)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_as_trl(mode: str, bounds: tuple[float | None, float | None]) -> None:
    options = ImportanceOptions(mode=mode, least=bounds[0], most=bounds[1])
    ratio, logged = _trls(options)
    mask = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
    want = ratio.expand(mask.shape)[mask]
    got = importance_weights(*_logps(), LENGTHS, options)
    # Sums of up to 7 numbers in another order.
    torch.testing.assert_close(got.weights, want, rtol=1e-6, atol=1e-6)
    assert len(got.weights.unique()) > 2
    sampling = {name.removeprefix("sampling/"): value for name, (value,) in logged.items()}
    assert {
        "importance_sampling_ratio/min": got.ratio_min,
        "importance_sampling_ratio/mean": got.ratio_mean,
        "importance_sampling_ratio/max": got.ratio_max,
        "sampling_logp_difference/mean": got.difference_mean,
        "sampling_logp_difference/max": got.difference_max,
    } == pytest.approx(sampling, rel=1e-6)


def test_defaults_are_trls() -> None:
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    tree = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_config.py").read_text())
    defaults = {
        node.target.id.removeprefix("vllm_importance_sampling_"): ast.literal_eval(node.value.keywords[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and node.target.id.startswith("vllm_importance_sampling_")
    }
    options = ImportanceOptions()
    ours = {"mode": options.mode, "clip_max": options.most, "clip_min": options.least}
    assert ours == {name: defaults[name] for name in ours}


def test_the_policys_own_samples_count_as_they_are() -> None:
    policy, _ = _logps()
    got = importance_weights(policy, policy, LENGTHS, ImportanceOptions())
    assert torch.equal(got.weights, torch.ones(len(policy)))
    assert (got.ratio_min, got.ratio_mean, got.ratio_max, got.difference_max) == (1, 1, 1, 0)


def test_no_completions() -> None:
    none = torch.empty(0)
    for mode in ("token_mask", "sequence_truncate"):
        got = importance_weights(none, none, torch.empty(0, dtype=torch.long), ImportanceOptions(mode=mode))
        assert got.weights.shape == (0,)
        assert got.ratio_mean == got.difference_mean == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "token"}, "mode is 'token': give one of token_truncate, token_mask"),
        ({"most": 0.5, "least": 0.7}, r"bounded by 0.7 and 0.5"),
        ({"least": -1.0}, r"bounded by -1.0 and 3.0"),
    ],
)
def test_refuses_options(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ImportanceOptions(**arguments)


def test_refuses_other_shapes() -> None:
    policy, sampler = _logps()
    for arguments in [
        (policy[:-1], sampler, LENGTHS),
        (policy, sampler, LENGTHS[:-1]),
        (policy[None], sampler[None], LENGTHS),
    ]:
        with pytest.raises(ValueError, match="give one of each for every token"):
            importance_weights(*arguments, ImportanceOptions())
