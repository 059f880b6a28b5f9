"""transformers' Trainer under accelerate's FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs.harness import Program, accelerate, run_both, script

PACKAGES = ("transformers", "accelerate")


@pytest.mark.parametrize(("optimizer", "within"), [("sgd", 1e-8), ("adamw_torch", 1e-5)])
def test_trainer(optimizer: str, within: float, tmp_path: Path) -> None:
    program = Program(
        name=f"transformers' Trainer, {optimizer}",
        words=[script("cpu_fsdp.py"), script("trainer.py"), optimizer, "{out}"],
        launcher=accelerate("fsdp2.yaml"),
        packages=PACKAGES,
    )
    run_both(program, tmp_path).assert_trained(steps=6, within=within)
