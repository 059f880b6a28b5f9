"""`train sft --optimizer`: the losses, and going on on another number of ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support import ranks, slow
from tests.support.sft_case import case, write_case
from tests.train.test_resume import ACROSS_RANKS, losses, train

# The last bits of a gradient become 1e-3 of Muon's update, as Newton-Schulz is bf16.
LIMITS = {"muon": 0.01}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("optimizers"))


@pytest.mark.parametrize(
    ("optimizer", "lr"),
    [("muon", 1e-2), slow("sgd", 0.3), *(slow(f"adamw_{how}", 1e-3) for how in ("plain", "foreach", "fused"))],
)
def test_goes_on_on_another_number_of_ranks(folder: Path, tmp_path: Path, optimizer: str, lr: float) -> None:
    """Stopped on two ranks, goes on on one, against a run of one rank."""
    alone = case(folder, out=str(tmp_path / "alone"), optimizer=optimizer, lr=lr, clip_norm=10.0)
    ranks.run(train, 1, alone, None)
    wanted = replace(alone, out=str(tmp_path / "out"), resume="auto")
    assert set(ranks.run(train, 2, replace(wanted, samples_per_rank=2), 2)) == {"stopped by SIGTERM"}
    assert ranks.run(train, 1, wanted, None) == ["ended"]
    want, got = losses(tmp_path / "alone"), losses(tmp_path / "out")
    torch.testing.assert_close(got, want, rtol=LIMITS.get(optimizer, ACROSS_RANKS), atol=0)
    assert want[-1] < want[0]
    if optimizer.startswith("adamw"):  # another order of the same operations
        default = replace(alone, out=str(tmp_path / "default"), optimizer="adamw")
        ranks.run(train, 1, default, None)
        torch.testing.assert_close(want, losses(tmp_path / "default"), rtol=ACROSS_RANKS, atol=0)


def _groups(rank: int, world: int, folder: Path) -> tuple[list[tuple[str, set[str]]], str]:
    """By optimizer, the names of what it steps; and what is said of a model whose blocks train no matrix."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from odc_triton import fully_shard
    from odc_triton.train.optimizers import make_optimizer

    options = case(folder, optimizer="muon")
    model, vectors = (
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "config.json")) for _ in range(2)
    )
    fully_shard(model)
    names = {id(p): name.rpartition("layers.")[2] for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, options)
    assert optimizer.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw"
    groups = [
        (type(each).__name__, {names[id(p)] for group in each.param_groups for p in group["params"]})
        for each in optimizer.optimizers
    ]
    for p in vectors.parameters():
        p.requires_grad_(p.ndim == 1)
    fully_shard(vectors)
    try:
        make_optimizer(vectors, options)
    except ValueError as error:
        return groups, str(error)
    return groups, "nothing"


def test_who_steps_what(folder: Path) -> None:
    ((((muon, by_muon), (adamw, by_adamw)), said),) = ranks.run(_groups, 1, folder)
    assert (muon, adamw) == ("Muon", "AdamW")
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert by_muon == {f"{layer}.{name}" for layer in range(2) for name in attention | mlp}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "0.self_attn.q_proj.bias"} <= by_adamw
    assert "no block of the model has a matrix to train: use --optimizer adamw" in said
