"""What is pushed to the hub, and what a push that fails says: against a server here that speaks its HTTP."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from odc_triton.jobs.train import push
from odc_triton.jobs.train.model_card import write_card
from odc_triton.jobs.train.push import push_folder, require_hub
from tests.support import jobs, ranks
from tests.support.deadlines import LONG_S
from tests.support.hub_stand_in import Hub, hub_stand_in
from tests.support.sft_case import case, write_case

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # the client's own
FILES = {"config.json": b"{}", "model.safetensors": bytes(100_000), "README.md": b"---\ntags: [a]\n---\n"}


def _use(patch: pytest.MonkeyPatch, url: str) -> None:
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setenv("HF_TOKEN", "hf_token")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # the pauses before a request is tried again
    with hub_stand_in() as hub:
        _use(monkeypatch, hub.url)
        yield hub
        hub.released.set()
        for thread in threading.enumerate():  # of a push that was given up
            if thread.name == "odc-hub":
                thread.join(LONG_S)


@pytest.mark.parametrize(
    ("faults", "says"),
    [
        ({}, None),
        ({"repos/create": [503], "commit": [429]}, None),
        ({"repos/create": ["cut"], "lfs/": ["cut", 502]}, None),
        ({"repos/create": [403]}, "403 Forbidden"),
        ({"commit": [503] * 3}, "503 Service Unavailable"),
        ({"lfs/": ["cut"] * 18}, "RemoteProtocolError: Server disconnected"),
        ({"preupload": ["hang"]}, "no end within 1 s"),
    ],
)
def test_a_push(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: dict, says: str | None) -> None:
    monkeypatch.setattr(push, "_PUSH_S", 0.5 if "preupload" in faults else 60.0)
    hub.faults, folder = faults, tmp_path / "a model"
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    if says is None:
        assert push_folder(folder, "us/run", private=True) == f"{hub.url}/us/run"
        assert hub.created["visibility"] == "private"
    else:
        with pytest.raises(OSError) as raised:
            push_folder(folder, "us/run", private=True)
        assert str(raised.value).startswith(f"the model is in {folder}, but not pushed (")
        assert says in str(raised.value)
        assert str(raised.value).endswith(f"); to push it: hf upload us/run '{folder}' . --private")
    assert hub.files == ({} if says else FILES)


@pytest.mark.parametrize(
    ("faults", "user", "repo_id", "says"),
    [
        ([503, 429], {}, "us/run", None),
        ([], {}, "run", None),
        ([401], {}, "me/run", "no token is known to be valid .*HF_TOKEN environment variable is invalid"),
        (["hang"], {}, "me/run", "no end within 0 s"),
        ([], {}, "you/run", "the token is of me and us: give one of these"),
        ([], {"auth": {"accessToken": {"role": "read"}}}, "me/run", "may only read"),
        ([], {}, "me/a/run", "'me/a/run'"),
    ],
)
def test_a_token_before_the_start(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, faults: list, user: dict, repo_id: str, says: str | None
) -> None:
    monkeypatch.setattr(push, "ASK_S", 0.3 if "hang" in faults else 60.0)
    hub.faults, hub.user = {"whoami": faults}, hub.user | user
    if says is None:
        require_hub(repo_id)
    else:
        with pytest.raises((OSError, ValueError), match=says):
            require_hub(repo_id)


def _train(rank: int, world: int, url: str, wanted: Any) -> list[str]:
    _use(pytest.MonkeyPatch(), url)
    return jobs.train(rank, world, [wanted, wanted])


def test_a_run_is_pushed_at_its_end(hub: Hub, tmp_path: Path) -> None:
    """Where that fails all ranks raise; the same command pushes the run that has ended."""
    hub.faults, out = {"repos/create": [403]}, tmp_path / "out"
    wanted = case(write_case(tmp_path), steps=1, push_to_hub="me/run", resume="auto")
    first, others = ranks.run(_train, 2, hub.url, wanted)
    assert first == others
    assert re.match(f"OSError: the model is in {out}/model, but not pushed", first[0])
    assert first[1] == jobs.ENDED
    assert hub.files == {each.name: each.read_bytes() for each in (out / "model").iterdir()}
    assert "# out\n\nA model trained from random weights on data.jsonl" in hub.files["README.md"].decode()


SFT = {"data": "org/chats:train", "model": "org/base", "contents": {"model": None}, "lr": 1e-3, "samples_per_step": 4}
GRPO = {"job": "grpo", "data": ["a/p.jsonl"], "model": "/home/me/base", "contents": {"model": "0f"}, "lr": 1e-3}


@pytest.mark.parametrize(
    ("file", "identity", "front", "texts"),
    [
        (
            "config.json",
            SFT | {"token_cap": 4096, "dtype": "bf16"},
            {"base_model": "org/base", "datasets": ["org/chats"], "library_name": "transformers"},
            [
                "](https://huggingface.co/org/base) on org/chats by `odc-triton train sft` in 2 steps",
                "| dtype of compute | bf16 |",
                "| peak learning rate | 0.001 |",
                "| samples per step | 4 |",
            ],
        ),
        (
            "config.json",
            SFT | {"job": "reward", "center": 0.5, "seed": 0},
            {"base_model": "org/base", "datasets": ["org/chats"], "library_name": "transformers"}
            | {"pipeline_tag": "text-classification", "tags": ["odc-triton", "reward"]},
            ["AutoModelForSequenceClassification.from_pretrained(folder)", "tokenizer.eos_token", "| --center | 0.5 |"],
        ),
        (
            "adapter_config.json",
            GRPO | {"lora_rank": 8, "prompts_per_step": 2, "reward": ["my:f", "my:g"]},
            {"library_name": "peft", "tags": ["odc-triton", "grpo", "lora"]},
            ["Adapters trained from base on p.jsonl", "| --reward | my:f my:g |"],
        ),
    ],
)
def test_a_model_card(tmp_path: Path, file: str, identity: dict, front: dict, texts: list[str]) -> None:
    (tmp_path / file).touch()
    write_card(tmp_path, identity, [{"step": 1, "loss": 2.5, "eval_loss": 1.5}, {"step": 2, "loss": 0.5}])
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {"pipeline_tag": "text-generation", "tags": ["odc-triton", "sft"]} | front
    text = " ".join(card.text.split())
    for part in [*texts, "| loss | 0.5 |", "| eval_loss | 1.5 |", "| torch | "]:
        assert part in text
    assert not re.search("token-cap|--lr|--seed|--model |/home|not the defaults", text)  # a default, a path
    write_card(tmp_path, identity, [])
    own = tmp_path / "README.md"
    assert "in 0 steps" in own.read_text()
    own.write_text("mine")
    write_card(tmp_path, identity, [])
    assert own.read_text() == "mine"
