"""The files of examples/configs run as they are, but for a small model, its data and few steps; `odc-triton new`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.tools.cli.command import main
from tests.support import ranks, slow
from tests.support.chats import CHATML, make_tokenizer
from tests.support.processors import encoded_image
from tests.support.sft_images import write_model

CONFIGS = Path(__file__).parent.parent / "examples" / "configs"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
MODELS = {"dpo_qwen": "qwen2", "lora_gemma3": "gemma3_text", "images_qwen_vl": "qwen2_5_vl", "hybrid_qwen35": "qwen3_5"}
MODELS |= dict.fromkeys(("sft_qwen3", "grpo_gsm8k", "sweep_lora"), "qwen3")
MODELS |= dict.fromkeys(("lora_llama", "qlora_llama", "long_context"), "llama")
FAST = ("lora_llama", "dpo_qwen")
FILES = sorted(CONFIGS.iterdir())


def _row(source: str, number: int) -> dict[str, Any]:
    """With the fields of the data set `source`."""
    asked, answer = f"the user asks {number}", "yes and no " * (1 + number % 9)
    chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    parts = [{"index": None, "text": asked, "type": "text"}, {"index": 0, "text": None, "type": "image"}]
    image = "data:image/png;base64," + base64.b64encode(encoded_image(seed=number)).decode()
    rows: dict[str, dict[str, Any]] = {
        "openai/gsm8k": {"question": asked, "answer": f"{answer}\n#### {number}"},
        "trl-lib/ultra": {"chosen": chat, "rejected": [chat[0], {**chat[1], "content": "no"}], "score_chosen": 6.0},
        "mlabonne": {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answer}]},
        "HuggingFaceH4/llava": {"messages": [{**chat[0], "content": parts}, chat[1]], "images": [image]},
    }
    return next((row for name, row in rows.items() if source.startswith(name)), {"messages": chat, "source": "x"})


def _write_model(folder: Path, kind: str) -> None:
    torch.manual_seed(0)
    if kind in ("qwen2_5_vl", "qwen3_5"):
        write_model(folder, kind, weights=True, like="qwen3_vl" if kind == "qwen3_5" else None)
    else:
        tokenizer = make_tokenizer(CHATML)
        config = AutoConfig.for_model(kind, **SIZES, num_key_value_heads=2, vocab_size=len(tokenizer), pad_token_id=0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _command(file: Path) -> list[str]:
    """Its first line."""
    return file.read_text().splitlines()[0].removeprefix("# odc-triton ").split()


@contextmanager
def _started() -> Iterator[mock.Mock]:
    """What starts a job, which does nothing within; models and data are on the hub, and not looked at."""
    with mock.patch("odc_triton.jobs.train.first_look.is_over", return_value=False):
        with mock.patch("odc_triton.tools.cli.command.start_job") as start:
            yield start


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_its_first_lines_are_a_command_and_the_hardware(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent.parent)
    with _started() as start:
        assert main(_command(file)) == 0
    assert start.call_args.args[2].out == f"out/{file.stem}"
    assert "Sized for" in file.read_text().splitlines()[1]


@pytest.mark.parametrize("file", [p if p.stem in FAST else slow(p) for p in FILES], ids=lambda p: p.stem)
def test_it_runs(file: Path, tmp_path: Path) -> None:
    given, command = yaml.safe_load(file.read_text()), _command(file)
    command[command.index(f"examples/configs/{file.name}")] = str(file)
    _write_model(tmp_path / "model", MODELS[file.stem])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(_row(given["data"], n)) + "\n" for n in range(64)))
    small = {"model": str(tmp_path / "model"), "data": str(tmp_path / "rows.jsonl"), "steps": 2}
    small |= {"eval-data": small["data"]} if "eval-data" in given else {}
    small |= {"max-new-tokens": 8, "prompts-per-rank": 4} if "reward" in given else {}
    if command[0] == "sweep":  # its file has the options of all runs
        given.pop("epochs")
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(given | small))
        command, small = ["sweep", str(tmp_path / "sweep.yaml")], {}
    options = [f"--{key}={value}" for key, value in small.items()]
    options += ["--out", str(tmp_path / "out"), "--ranks", "2" if "split-sequences" in given else "1"]
    status, *printed = ranks.command(*command, *options)
    assert status == 0, printed
    assert len([*tmp_path.glob("out/**/metrics.jsonl")]) == (6 if command[0] == "sweep" else 1)


@pytest.mark.parametrize("job", ["sft", "grpo", "dpo"])
def test_a_new_file_is_accepted(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", job]) == 0
    text, printed = Path(f"{job}.yaml").read_text(), capsys.readouterr().out
    assert printed.endswith(f": odc-triton train {job} --config {job}.yaml\n")
    with _started() as start:
        main(printed.partition(": odc-triton ")[2].split())
    wanted, said = start.call_args.args[2], " ".join(text.replace("\n# ", " ").split())
    for entry in fields(wanted):
        is_there = f"\n{entry.name.replace('_', '-')}: " in text
        assert is_there == (" ".join(entry.metadata["help"].split()) in said)
        assert is_there or getattr(wanted, entry.name) == entry.default
    assert main(["new", job]) == 1
    assert capsys.readouterr().err == f"odc-triton: {job}.yaml is there already: give another name, or remove it\n"
    assert Path(f"{job}.yaml").read_text() == text
