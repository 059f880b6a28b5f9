"""What is wrong is said before any rank starts, and before all the data are read."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
from pathlib import Path

import pytest

from odc_triton.checkpoint.folder import Manifest
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.tools.cli import start
from odc_triton.tools.cli.command import main
from tests.support import ranks
from tests.support.sft_case import QWEN2, write_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("preflight"))
    (folder / "small.json").write_text(json.dumps(QWEN2 | {"vocab_size": 50}))
    (folder / "no-weights").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / "no-weights" / name).write_bytes((folder / name).read_bytes())
    (folder / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (folder / "late.jsonl").write_text('{"text": "a"}\n{"txt": "a"}\n')
    (folder / "layers.json").write_text(json.dumps(QWEN2 | {"layer_types": ["full_attention"]}))
    (folder / "long.jsonl").write_text(json.dumps({"text": "A licensor grants. " * 200}) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 3)
    (folder / "late_prompts.jsonl").write_text('{"prompt": "a"}\n' * 30 + '{"prompt": "a", "answer": "b"}\n')
    (folder / "my_reward.py").write_text(
        "def f(completions, **columns): return [0.0 for _ in completions]\n"
        "def answered(completions, answer, **columns): return [0.0 for _ in completions]"
    )
    (folder / "no-tokenizer").mkdir()
    (folder / "model-alone").mkdir()  # transformers makes an empty tokenizer of it
    (folder / "model-alone" / "config.json").write_text(json.dumps(QWEN2))
    (folder / "file").touch()
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").touch()
    (folder / "used").mkdir()
    (folder / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    saved = {"identity": SftOptions(data="hub", init="config.json", tokenizer="t", out="run", dtype="fp32").identity(1)}
    saved["identity"]["prepared"] = ["digest"]
    checkpoint = folder / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(saved))
    (checkpoint / "manifest.json").write_bytes(Manifest(number=0, step=1, world=1, files={}).to_json())
    (folder / "run" / "run.json").write_text(json.dumps(saved))
    return folder


class Started(Exception):
    pass


def started(*_: object, **__: object) -> None:
    raise Started


# What differs from a right command, and what it says; None: ranks start.
_SFT = [
    ({}, None),
    (
        {"--init": None, "--model": "nowhere"},
        "nowhere is not a local file or folder, so it was taken for a hub id",
    ),
    ({"--init": None, "--model": "no-weights"}, "no-weights has neither model.safetensors nor"),
    ({"--tokenizer": "no-tokenizer"}, "no-tokenizer has no tokenizer that transformers can load: "),
    (
        {"--init": None, "--model": "model-alone", "--tokenizer": None},
        "model-alone has no tokenizer: give --tokenizer$",
    ),
    ({"--data": "chats.jsonl"}, "chats.jsonl, line 1: messages need a tokenizer with a chat template"),
    ({"--data": "late.jsonl"}, "late.jsonl, line 2: needs 'text'"),
    ({"--init": "small.json"}, r"made token \d+ and the model has only 50"),
    ({"--out": "file"}, r"file can't be written to \(it is a file\): give another --out"),
    ({"--resume": "nowhere"}, "--resume nowhere: there is no such folder; give auto, or a checkpoint"),
    (
        {"--lora-rank": "2", "--lora-targets": "nosuch"},
        "--lora-targets nosuch: .* This model's linear layers: q_proj, k_proj, v_proj, o_proj",
    ),
    ({"--out": "weights"}, "weights is a model's folder, and a run writes its model into a folder in --out: give an"),
    ({"--out": "used"}, "used holds a run already: continue it with --resume auto, or give another --out"),
    ({"--init": "layers.json"}, "layers.json is not the config of a model .* must be equal to .*layer.types.*"),
    (
        {"--data": "long.jsonl", "--samples-per-rank": "1"},
        r"the longest sample has \d{3,} tokens and the model takes at most 256 \(max_position_embeddings\): "
        "lower --token-cap and give --truncate or --drop-long",
    ),
    (
        {"--ranks": "3", "--replicas": "2", "--samples-per-rank": "1"},
        "--replicas is 2 and --ranks is 3: give a number of replicas that divides the ranks",
    ),
    (
        {"--ranks": "2", "--replicas": "2", "--split-sequences": ""},
        "--replicas is 2, of one rank each, and --split-sequences splits samples over the ranks of a replica: give it "
        "more ranks, or leave --split-sequences out",
    ),
    (
        {"--data": "long.jsonl", "--token-cap": "300", "--ranks": "4", "--replicas": "2", "--split-sequences": ""},
        r"long.jsonl, line 1: 3001 tokens, more than the cap of 600; raise --token-cap, or give --trunc",
    ),
    (
        {"--resume": "no-weights"},
        "--resume no-weights is no checkpoint of a run: give auto, or a checkpoint: OUT/checkpoints/step-…",
    ),
    ({"--resume": "run/checkpoints/step-00000001"}, None),
    (
        {"--out": "run", "--resume": "auto", "--balance": "local"},
        r"the run in run had other options \(--balance was 'mini' and is 'local'\): give the same, or another",
    ),
]


_GRPO = [
    (
        {"--init": None, "--model": "model-alone", "--tokenizer": None},
        "model-alone has no tokenizer: give --tokenizer$",
    ),
    ({"--ranks": "3", "--replicas": "2"}, "--replicas is 2 and --ranks is 3: give a number of replicas that divides"),
    (
        {"--prompts-per-rank": "1", "--max-new-tokens": "300"},
        r"the longest sample has 30\d tokens and the model takes at most 256",
    ),
    (
        {"--reward": "my_reward:answered"},
        r"keywords prompts, completions, completion_ids \(missing a required argument: 'answer'\), which are all",
    ),
    ({"--reward": "my_reward:answered", "--data": "late_prompts.jsonl", "--max-new-tokens": "9"}, None),
]

# Its libraries try for more than half a minute, and print each try.
_NO_HUB = [
    (
        {"--data": "nofile"},
        "nofile is not a local file, so it was taken for a data set on the hub, and can't be read: ",
    ),
    ({"--init": None, "--model": "nobody/nothing"}, "nobody/nothing is not a local file .* and can't be read: "),
]


def _run(folder: Path, name: str, usual: dict[str, str], cases: list, hub: str | None) -> list[tuple[str, str]]:
    """How each command ended, and what it printed."""
    from huggingface_hub import constants

    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = str(int(hub is None))
    constants.HF_HUB_OFFLINE = hub is None
    constants.ENDPOINT = hub or constants.ENDPOINT
    start.warn_of_few_cores = started
    ends = []
    for changes, _ in cases:
        options = [word for option, value in (usual | changes).items() if value is not None for word in (option, value)]
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            try:
                end = f"status {main(['train', name, *filter(None, options)])}"
            except Started:
                end = "started"
        ends.append((end, printed.getvalue()))
    return ends


def _check(folder: Path, name: str, cases: list, hub: str | None = None) -> None:
    usual = {"--data": "data.jsonl", "--init": "config.json", "--tokenizer": "tokenizer.json", "--out": "out"}
    if name == "grpo":
        usual |= {"--data": "prompts.jsonl", "--reward": "my_reward:f"}
    ends = ranks.in_own_process(_run, folder, name, usual, cases, hub)
    expected = [("started", "") if said is None else ("status 1", f"odc-triton: .*{said}.*\n") for _, said in cases]
    wrong = [
        (changes, found)
        for (changes, _), found, (end, printed) in zip(cases, ends, expected, strict=True)
        if found[0] != end or not re.fullmatch(printed, found[1])
    ]
    assert not wrong


def test_said_before_the_start(folder):
    _check(folder, "sft", _SFT)


def test_said_before_the_start_of_grpo(folder):
    _check(folder, "grpo", _GRPO)


def test_a_hub_that_does_not_answer(folder):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        why = f"it is not in the hub's cache, and the hub at {address} does not answer \\(.*Connection refused.*\\)"
        _check(folder, "sft", [(changes, said + why) for changes, said in _NO_HUB], hub=address)
