"""What is wrong is said before any rank starts, and before all the data are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from odc_triton.cli import start
from odc_triton.cli.command import main
from tests.support.sft_case import QWEN2, write_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("preflight"))
    (folder / "foo.json").write_text(json.dumps(QWEN2 | {"hidden_act": "foo"}))
    (folder / "small.json").write_text(json.dumps(QWEN2 | {"vocab_size": 50}))
    (folder / "no-weights").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / "no-weights" / name).write_bytes((folder / name).read_bytes())
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (folder / "late.jsonl").write_text('{"text": "a"}\n{"txt": "a"}\n')
    (folder / "file").touch()
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


class Started(Exception):
    pass


def started(*_: object, **__: object) -> None:
    raise Started


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"--init": "foo.json"}, "foo.json: hidden_act is 'foo'"),
        ({"--init": None, "--model": "./nowhere"}, "./nowhere: there is no such file or folder"),
        (
            {"--init": None, "--model": "nowhere"},
            "nowhere is not a local file or folder, so it was taken for a hub id",
        ),
        ({"--init": None, "--model": "no-weights"}, "no-weights has neither model.safetensors nor"),
        ({"--tokenizer": "./missing.json"}, "missing.json"),
        ({"--data": "chats.jsonl"}, "chats.jsonl, line 1: messages need a tokenizer with a chat template"),
        ({"--data": "late.jsonl"}, "late.jsonl, line 2: needs 'text'"),
        ({"--eval-data": "late.jsonl"}, "late.jsonl, line 2: needs 'text'"),
        ({"--init": "small.json"}, r"made token \d+ and the model has only 50"),
        ({"--out": "file"}, r"file can't be written to \(it is a file\): give another --out"),
        ({"--out": "file/below"}, r"below can't be written to \(Not a directory\): give another --out"),
        ({"--resume": "nowhere"}, "--resume nowhere: there is no such folder; give auto, or a checkpoint"),
        (
            {"--lora-rank": "2", "--lora-targets": "nosuch"},
            "--lora-targets nosuch: .* This model's linear layers: q_proj, k_proj, v_proj, o_proj",
        ),
        ({"--out": "used"}, "used holds another run: continue it with --resume auto, or give another --out"),
    ],
)
def test_said_before_the_start(folder, monkeypatch, capsys, changes, said):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(start, "warn_of_few_cores", started)
    given = {"--data": "data.jsonl", "--init": "config.json", "--tokenizer": "tokenizer.json", "--out": "out"} | changes
    command = ["train", "sft", *(word for pair in given.items() if pair[1] is not None for word in pair)]
    if said is None:
        with pytest.raises(Started):
            main(command)
        return
    assert main(command) == 1
    assert re.fullmatch(f"odc-triton: .*{said}.*\n", capsys.readouterr().err)
