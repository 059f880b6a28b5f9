"""Trainers of adapters on bitsandbytes' quantised bases, against TRL's and transformers' on one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from tests.nn.test_packed import INT8, NF4
from tests.support import pair_case, ranks, trl_case
from tests.support.models import build
from tests.support.trl_case import adapted, model_of, tokenizer

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="TRL needs Python 3.11"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # by PEFT
    pytest.mark.slow,
]
STORED = NF4 | {"bnb_4bit_quant_storage": torch.float32}
# Of GRPO and DPO the reference is the base without adapters.
RUNS = {
    "SFT": (NF4, {}),
    "SFT, int8": (INT8, {}),
    "GRPO": (NF4, {"lora": "base", "beta": 0.1}),
    "GRPO, int8": (INT8, {"lora": "base", "beta": 0.1}),
    "DPO, stored as fp32": (STORED, {"lora": "new"}),
    "DPO, int8": (INT8, {"lora": "new"}),
}


def save_quantised(folder: Path, options: dict[str, Any]) -> str:
    build("qwen2").save_pretrained(folder / "plain")
    config = BitsAndBytesConfig(**options)
    AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config).save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    return str(folder / "base")


def _run(
    rank: int, world: int, name: str, ours: bool, folder: str, start: str, more: Any = None, resume: Any = None
) -> Any:
    kind, changes = name.split(",")[0], RUNS[name][1] | (more or {})
    if kind == "SFT":
        found = trl_case.sft_run(ours, world, folder, adapted(model_of(start), "base"), changes, resume)
    elif kind == "DPO":
        found = pair_case.run(kind, ours, world, folder, start, dict(changes), resume)
    elif ours:
        found = trl_case.odc_run(rank, world, folder, start, dict(changes), resume)
    else:
        found = trl_case.plain_run(rank, world, folder, start, dict(changes))
    return found | {"weights": {key: value for key, value in found["weights"].items() if "lora" in key}}


@pytest.mark.parametrize("name", RUNS)
def test_as_trl(tmp_path: Path, name: str) -> None:
    """Losses, metrics and adapters."""
    start = save_quantised(tmp_path, RUNS[name][0])
    (plain,) = ranks.run(_run, 1, name, False, str(tmp_path / "plain"), start)
    ours = ranks.run(_run, 2, name, True, str(tmp_path / "ours"), start)
    assert plain["weights"].keys() == ours[0]["weights"].keys()
    for key, value in plain["weights"].items():
        torch.testing.assert_close(
            ours[0]["weights"][key], value, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )
    for got in ours:
        for one, want in zip(got["logs"], plain["logs"], strict=True):
            for key in want.keys() & {"loss", "grad_norm", "kl", "entropy", "rewards/margins", "eval_loss"}:
                assert one[key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("name", ["SFT", "DPO, int8"])
def test_resume_on_another_number_of_ranks(tmp_path: Path, name: str) -> None:
    """A checkpoint has adapters alone, for plain PEFT, and their masters."""
    start = save_quantised(tmp_path, RUNS[name][0])
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = ranks.run(_run, 2, name, True, str(tmp_path / "whole"), start, saving)[0]
    at = tmp_path / "whole" / "checkpoint-2"
    resumed = ranks.run(_run, 1, name, True, str(tmp_path / "resumed"), start, saving, str(at))[0]
    for key, value in whole["weights"].items():
        torch.testing.assert_close(resumed["weights"][key], value, rtol=1e-5, atol=1e-6)
    assert not list(at.glob("model*"))
    assert (at / "odc" / "base.json").is_file()
    plain = PeftModel.from_pretrained(model_of(start), tmp_path / "whole" / "checkpoint-4")
    for key, value in plain.named_parameters():
        if "lora" in key:
            torch.testing.assert_close(value, whole["weights"][key])
