"""`train sft --optimizer`: which optimizer steps which parameter. How it trains is in test_jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from odc_triton import fully_shard
from odc_triton.jobs.train.optimizers import make_optimizer
from tests.support import ranks
from tests.support.sft_case import case, write_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("optimizers"))


def _groups(rank: int, world: int, folder: Path) -> tuple[list[tuple[str, set[str]]], str, dict]:
    """By optimizer, the names of what it steps; what is said of a model whose blocks train no matrix; and what torch's
    own optimizers were made with, by --optimizer.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

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
    plain = {}
    for name in ("sgd", "adamw", "adamw-8bit"):
        made = make_optimizer(model, case(folder, optimizer=name, weight_decay=0.5))
        (group,) = made.param_groups
        assert len(group["params"]) == len(names)
        plain[name] = (type(made).__name__, group["lr"], group["weight_decay"])
    for p in vectors.parameters():
        p.requires_grad_(p.ndim == 1)
    fully_shard(vectors)
    try:
        make_optimizer(vectors, options)
    except ValueError as error:
        return groups, str(error), plain
    return groups, "nothing", plain


def test_who_steps_what(folder: Path) -> None:
    ((((muon, by_muon), (adamw, by_adamw)), said, plain),) = ranks.run(_groups, 1, folder)
    assert (muon, adamw) == ("Muon", "AdamW")
    attention = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert by_muon == {f"{layer}.{name}" for layer in range(2) for name in attention | mlp}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "0.self_attn.q_proj.bias"} <= by_adamw
    assert "no block of the model has a matrix to train: use --optimizer adamw" in said
    made = {"sgd": "SGD", "adamw": "AdamW", "adamw-8bit": "AdamW8bit"}
    assert plain == {name: (kind, 1e-3, 0.5) for name, kind in made.items()}
