"""Runs on a packed base: what they train, against bitsandbytes and PEFT in one process; stops, exports, refusals."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from odc_triton.jobs.train.run_options import RunOptions
from odc_triton.tools.cli.command import main
from tests.support import grpo_case, jobs, slow
from tests.support.sft_case import case, write_case
from tests.train.test_features import data, plain_loss

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks
BNB: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("quantize"))
    grpo_case.write_prompts(folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "config.json")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder


def base(folder: Path, method: str) -> nn.Module:
    how: Any = {"quantization_config": BitsAndBytesConfig(**BNB[method]), "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder / "base", **how).train()
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False  # else it computes in bf16 in eval(), and not in these shapes
    return model


CHANGES: dict[str, Any] = {"init": None, "samples_per_rank": 2, "steps": 4, "lr": 1e-2, "lora_rank": 4}
CHANGES |= {"gradient_checkpointing": True, "replace_layers": True}


@pytest.mark.parametrize("method", ["nf4", slow("int8")])
def test_a_run(method: str, folder: Path, tmp_path: Path) -> None:
    """Stopped and resumed by another number of ranks; its adapter on bitsandbytes' base; exported, merged."""
    wanted = case(folder, model=str(folder / "base"), out=str(tmp_path / "out"), quantize=method, **CHANGES)
    wanted = replace(wanted, eval_data=str(folder / "data.jsonl"), resume="auto")
    assert jobs.run(2, wanted, stop_after=2) == [jobs.STOPPED]
    assert jobs.run(1, replace(wanted, samples_per_rank=4)) == [jobs.ENDED]
    seen = jobs.lines(wanted.out)
    samples = data(folder)
    adapted = PeftModel.from_pretrained(base(folder, method), tmp_path / "out" / "adapter")
    assert seen[-1]["eval_loss"] == pytest.approx(plain_loss(adapted, samples), rel=1e-5)
    assert seen[-1]["eval_loss"] < plain_loss(base(folder, method), samples) - 0.01

    assert main(["export", wanted.out, "--merge", "--out", str(tmp_path / "merged")]) == 0
    plain: Any = base(folder, method)
    merged = PeftModel.from_pretrained(plain.dequantize(), tmp_path / "out" / "adapter").merge_and_unload()
    expected = dict(merged.named_parameters())
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-7, msg=name)  # a sum of four products


@pytest.mark.slow
def test_grpo_with_a_reference(folder: Path, tmp_path: Path) -> None:
    """The reference is packed as the policy's base: at first both are the same."""
    changes = {name: value for name, value in CHANGES.items() if name not in ("samples_per_rank", "init")}
    packed = {"model": str(folder / "base"), "init": None, "out": str(tmp_path / "out"), "quantize": "nf4", "kl": 0.1}
    assert jobs.run(2, grpo_case.case(folder, **changes | packed)) == [jobs.ENDED]
    kls = [line["kl"] for line in jobs.lines(tmp_path / "out")]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert kls[-1] > 1e-6


REFUSED = {
    "no adapters": ({"lora_rank": 0}, r"--quantize is nf4, for a frozen base only: give --lora-rank"),
    "random weights": ({"model": None, "init": "config.json"}, r"--quantize is nf4: give --model too"),
    "another method": ({"quantize": "nf3"}, r"quantize.*nf3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, folder: Path, tmp_path: Path) -> None:
    changes, words = REFUSED[name]
    given = CHANGES | {"model": str(folder / "base"), "quantize": "nf4", "out": str(tmp_path / "out")} | changes
    given["init"] = None if given["init"] is None else str(folder / given["init"])

    def end() -> str:
        try:
            wanted: RunOptions = case(folder, **given)
        except ValueError as error:
            return str(error)
        return jobs.run(1, wanted)[0]

    assert re.search(words, end())
