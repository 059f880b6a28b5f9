"""Lightning's Trainer and Fabric, with checkpoints across both ways; Fabric also where ranks have different numbers of
microbatches.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.harness import Program, assert_goes_on, compared, run, script

WITHIN = {"sgd": 1e-12, "adamw": 1e-5}  # in float64, and in float32 as test_transformers.py says
ONE_PROCESS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")


def _program(name: str, words: list[str], model: Path) -> Program:
    return Program(
        name=name,
        words=[*words, str(model), "{out}"],
        environment="lightning",
        start=model,
        packages=["lightning", "transformers"],
    )


@pytest.mark.parametrize("optimizer", WITHIN)
def test_trainer(optimizer: str, model: Path, tmp_path: Path) -> None:
    program = _program(f"Lightning Trainer, {optimizer}", [script("lightning_trainer.py"), optimizer], model)
    assert_goes_on(program, tmp_path, lambda saved: [str(saved / "epoch=0.ckpt")], within=WITHIN[optimizer])


@pytest.mark.parametrize("optimizer", WITHIN)
def test_fabric(optimizer: str, model: Path, tmp_path: Path) -> None:
    program = _program(f"Fabric, {optimizer}", [script("fabric.py"), optimizer, "even"], model)
    assert_goes_on(program, tmp_path, lambda saved: [str(saved / "checkpoint")], within=WITHIN[optimizer])


@pytest.mark.parametrize("optimizer", WITHIN)
def test_fabric_on_different_numbers_of_microbatches(optimizer: str, model: Path, tmp_path: Path) -> None:
    """Against one process, as FSDP2's ranks would wait for each other forever."""
    program = _program(f"Fabric, uneven, {optimizer}", [script("fabric.py"), optimizer, "uneven"], model)
    plain = run(replace(program, launcher=ONE_PROCESS), tmp_path / "plain")
    odc = run(program, tmp_path / "odc", with_odc=True)
    assert "1 sequences on rank 0" in odc.output
    compared(program, plain, odc).assert_trained(steps=6, within=WITHIN[optimizer])
