"""LLaMA-Factory under accelerate's FSDP2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.programs.chats import STEPS, WITHIN, write_chats
from tests.programs.harness import Program, accelerate, run_both, script


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("llama-factory"))


def _program(folder: Path, kind: str, optimizer: str) -> Program:
    options = {
        "model_name_or_path": folder / "model",
        "dataset_dir": folder,
        "output_dir": "{out}",
        "finetuning_type": kind,
        "optim": optimizer,
    }
    words = ["-m", "llamafactory.launcher", script("llama_factory.yaml")]
    return Program(
        name=f"LLaMA-Factory, {kind}, {optimizer}",
        words=[script("cpu_fsdp.py"), *words, *(f"{name}={value}" for name, value in options.items())],
        launcher=accelerate("fsdp2.yaml"),
        environment="llama-factory",
        start=folder / "model" if kind == "full" else None,
        packages=["llamafactory", "transformers", "accelerate", "peft", "trl"],
    )


def _printed(folder: Path) -> list[float]:
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", (folder / "output.log").read_text())]


@pytest.mark.parametrize(("kind", "optimizer"), [("full", "sgd"), ("full", "adamw_torch"), ("lora", "sgd")])
def test_trains_the_same(kind: str, optimizer: str, folder: Path, tmp_path: Path) -> None:
    outcome = run_both(_program(folder, kind, optimizer), tmp_path)
    outcome.assert_trained(steps=STEPS, within=WITHIN[optimizer])
    plain, odc = (_printed(tmp_path / each) for each in ("plain", "odc"))
    assert plain == odc
    assert len(plain) == STEPS
    assert plain[0] > plain[-1]
