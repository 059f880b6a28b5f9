"""axolotl under FSDP2, unmodified and by its plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.programs.chats import STEPS, WITHIN, write_chats
from tests.programs.harness import Program, accelerate, run_both, script

CONFIG = {
    "model_type": "AutoModelForCausalLM",
    "chat_template": "tokenizer_default",
    "sequence_len": 128,
    "sample_packing": False,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": STEPS,
    "num_epochs": 4,
    "seed": 0,  # of the order of the samples, which is another one each time without it
    "dataset_num_proc": 1,
    "learning_rate": 1e-2,
    "adam_epsilon": 1e-5,
    "lr_scheduler": "cosine",
    "attn_implementation": "sdpa",
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "val_set_size": 0,
    "fsdp_version": 2,
    "fsdp_config": {
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": "Qwen2DecoderLayer",
        "state_dict_type": "FULL_STATE_DICT",
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": False,
        "offload_params": False,
    },
}
# Its packs have documents one after another, whose positions restart.
PACKED = {"sample_packing": True, "pad_to_sequence_len": True, "gradient_checkpointing": True}
PLUGIN = {"plugins": ["odc_triton.hf.AxolotlPlugin"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("axolotl"))


def _words(folder: Path, config: Path, **changes: Any) -> list[str]:
    """Writes `config`, for which axolotl's command is this."""
    data = {"path": str(folder / "chats.jsonl"), "type": "chat_template", "ds_type": "json"}
    own = {
        "base_model": str(folder / "model"),
        "datasets": [data],
        "output_dir": "trained",
        "dataset_prepared_path": "prepared",
    }
    config.write_text(yaml.safe_dump(CONFIG | own | changes))
    return [script("cpu_fsdp.py"), "-m", "axolotl.cli.train", str(config)]


def _program(name: str, folder: Path, words: list[str], words_with_odc: list[str] | None = None) -> Program:
    return Program(
        name=f"axolotl, {name}",
        words=words,
        words_with_odc=words_with_odc,
        launcher=accelerate("fsdp2.yaml"),
        environment="axolotl",
        start=folder / "model",
        packages=["axolotl", "transformers", "accelerate", "trl"],
        # accelerate 1.13 takes a CPU only where it is told to, and does not tell ranks what its file says.
        variables={"ACCELERATE_USE_CPU": "true", "AXOLOTL_DO_NOT_TRACK": "1"},
    )


@pytest.mark.parametrize(
    ("name", "optimizer", "changes"), [("padded", "sgd", {}), ("packed, checkpointed", "adamw_torch", PACKED)]
)
def test_trains_the_same(name: str, optimizer: str, changes: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    words = _words(folder, tmp_path / "config.yaml", optimizer=optimizer, **changes)
    outcome = run_both(_program(f"{name}, {optimizer}", folder, words), tmp_path)
    outcome.assert_trained(steps=STEPS, within=WITHIN[optimizer])


def test_plugin(folder: Path, tmp_path: Path) -> None:
    """One line of YAML, and nothing before the program."""
    plain = _words(folder, tmp_path / "plain.yaml", optimizer="sgd")
    odc = _words(folder, tmp_path / "odc.yaml", optimizer="sgd", **PLUGIN)
    run_both(_program("plugin, sgd", folder, plain, odc), tmp_path).assert_trained(steps=STEPS, within=WITHIN["sgd"])
