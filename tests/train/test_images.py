"""Runs on images: what they learn, freeze, write and refuse."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from odc_triton.jobs.data.vision import read_processor
from odc_triton.jobs.train.model import build_model
from odc_triton.jobs.train.sft import check_before_start
from odc_triton.step import one_ahead
from odc_triton.tools.cli.command import main
from tests.support import jobs, slow
from tests.support.processors import WITHOUT_TORCHVISION, image
from tests.support.sft_case import write_case
from tests.support.sft_images import case, of_model, write_model, write_records
from tests.support.vision import FAMILIES

pytestmark = WITHOUT_TORCHVISION


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_model(folder / "model", "qwen2_5_vl")
    write_model(folder / "gemma3", "gemma3", weights=True)  # without, its projector would begin with zeros
    write_model(folder / "qwen3_5", "qwen3_5", weights=True, like="qwen3_vl")
    write_records(folder, "learned", asked=3, text=4)
    write_records(folder, "held_out", asked=1, text=0, seed=1)
    return folder


def logits(folder: Path) -> torch.Tensor:
    """Of plain transformers, for an image and a text."""
    from transformers import AutoModelForImageTextToText

    model, processor = AutoModelForImageTextToText.from_pretrained(folder).eval(), read_processor(folder)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    inputs = processor(text=[text], images=[[image()]], return_tensors="pt")
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("family", ["gemma3", slow("qwen3_5")])
def test_a_run_on_two_ranks_and_what_it_writes(family: str, folder: Path, tmp_path: Path) -> None:
    """Plain transformers has the same logits from the model that the run writes and from its exported checkpoint."""
    how = {"eval_data": str(folder / "held_out.jsonl"), "checkpoint_every": 3, "steps": 3, "freeze_vision_tower": True}
    wanted = case(folder, **of_model(folder / family), **how, out=str(tmp_path / "out"))
    check_before_start(wanted, 2)
    assert jobs.run(2, wanted) == [jobs.ENDED]
    lines = jobs.lines(wanted.out)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert math.isfinite(lines[-1]["eval_loss"])
    assert main(["export", wanted.out, "--out", str(tmp_path / "exported")]) == 0
    trained = logits(tmp_path / "out" / "model")
    assert torch.equal(trained, logits(tmp_path / "exported"))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_a_frozen_tower_leaves_the_projector(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", family)
    how = {"tokenizer": None, "longest": 8, "largest_token": 8, "rank": 1}

    def named(**changes: Any) -> dict[str, bool]:
        wanted = case(tmp_path, data="hub", **changes)
        model, _ = build_model(wanted, **how)
        return {name: each.requires_grad for name, each in model.named_parameters()}

    tower = FAMILIES[family].model().get_encoder(modality="image")
    inside = sum(1 for name, _ in tower.named_parameters() if "merger" not in name)
    found = named(freeze_vision_tower=True)
    frozen = [name for name, trains in found.items() if not trains]
    assert len(frozen) == inside > 0
    assert all(named().values())
    assert not [name for name in frozen if "language_model" in name or "lm_head" in name]
    adapted = [name for name in named(freeze_vision_tower=True, lora_rank=2) if "lora_A" in name]
    whole = [name for name in named(lora_rank=2) if "lora_A" in name]
    assert 0 < len(adapted) < len(whole)
    assert not [name for name in adapted if any(name.endswith(f"{each}.lora_A.default.weight") for each in frozen)]


def _without(folder: Path, name: str) -> Path:
    copy = folder.parent / f"without-{Path(name).stem}"
    if not copy.exists():
        shutil.copytree(folder, copy)
        (copy / name).unlink()
    return copy


def _text(folder: Path) -> dict[str, str]:
    made = write_case(folder / "text")
    return {"init": str(made / "config.json"), "tokenizer": str(folder / "model")}


def _lost(folder: Path) -> str:
    records = (folder / "held_out.jsonl").read_text().splitlines()
    records[1] = json.dumps(json.loads(records[1]) | {"images": ["nowhere.png"]})
    (folder / "lost.jsonl").write_text("\n".join(records))
    return str(folder / "lost.jsonl")


REFUSED: list[tuple[Callable[[Path], dict[str, Any]], str]] = [
    (lambda f: {"data": _lost(f)}, r"lost.jsonl, line 2, image 1 \(nowhere.png\): it cannot be read: No such file"),
    (
        _text,
        r"learned.jsonl, line \d+ has images, and .*config.json is a qwen2, which sees none in a pack: give a",
    ),
    (
        lambda f: of_model(_without(f / "model", "processor_config.json")),
        r"learned.jsonl, line \d+ has images, and .*without-processor_config has no processor for them: give the fol",
    ),
    (lambda f: {"tokenizer": str(f / "gemma3")}, r"gemma3 has \[304\] for the tokens of images, and the model's"),
    (
        lambda f: (
            {"data": str(write_case(f / "no-tower") / "data.jsonl"), "truncate": True}
            | {"freeze_vision_tower": True}
            | _text(f)
        ),
        "--freeze-vision-tower: Qwen2ForCausalLM has no vision tower: leave it out",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_said_before_the_start(folder: Path, tmp_path: Path, change: Callable[[Path], dict], said: str) -> None:
    wanted = case(folder, out=str(tmp_path / "out"), **change(folder))
    with pytest.raises((ValueError, OSError), match=said):
        check_before_start(wanted, 1)


def test_the_next_is_made_while_one_is_used() -> None:
    made, begun, used = [], threading.Event(), threading.Event()

    def make(item: int) -> int:
        made.append(item)
        if item == 1:
            begun.set()
            assert used.wait(60)
        return 10 * item

    found = one_ahead(make, range(4))
    assert next(found) == 0
    assert begun.wait(60)
    assert made == [0, 1], "and no more: packs are large"
    used.set()
    assert [*found] == [10, 20, 30]
    assert [*one_ahead(make, [])] == []
