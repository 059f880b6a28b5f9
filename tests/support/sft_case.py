"""A small run of supervised fine-tuning: real text, a tokenizer trained on it, a model's config."""

from __future__ import annotations

import json
from pathlib import Path

from odc_triton.jobs.data.tokenizer import train_tokenizer
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support.deadlines import LONG_S

LICENSE = Path(__file__).parents[2] / "LICENSE"  # real text that does not change
VOCABULARY = 300
QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def write_case(folder: Path, *, config: dict | None = None, records: int = 40, characters: int = 120) -> Path:
    """Writes data.jsonl, tokenizer.json, config.json and without-dropout.json; returns the folder.

    `characters`: the most in a completion.

    `config`: changes to the model's, whose `model_type` is qwen2 or gpt2.
    """
    texts = []
    for paragraph in LICENSE.read_text().split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        for index, line in enumerate(lines[:-1]):
            texts.append({"prompt": line[:60], "completion": "\n".join(lines[index + 1 :])[:characters]})
    assert len(texts) >= records
    texts = texts[:records]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in texts))
    tokenizer = train_tokenizer((r["prompt"] + r["completion"] for r in texts), vocab_size=VOCABULARY)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = config or {}
    plain = GPT2 if config.get("model_type") == "gpt2" else QWEN2
    (folder / "config.json").write_text(json.dumps(plain | config))
    (folder / "without-dropout.json").write_text(json.dumps(plain))
    return folder


def write_questions(folder: Path) -> Path:
    """As `write_case`, with seven questions with four answers each in data.jsonl, and records alone, some twice as long
    as these; in alone.jsonl the latter.
    """
    write_case(folder, records=20, characters=300)
    alone, text = (folder / "data.jsonl").read_text(), LICENSE.read_text()
    asked = [
        {"prompt": text[n * 700 : n * 700 + 160], "completion": text[n * 700 + 160 + 50 * a :][: 20 + 15 * a]}
        for a in range(4)  # a question's answers are far apart
        for n in range(7)
    ]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in asked) + alone)
    (folder / "alone.jsonl").write_text(alone)
    return folder


def case(folder: Path, **changes: object) -> SftOptions:
    """Options of a run on what `write_case` wrote: four samples per step."""
    wanted = {
        "data": str(folder / "data.jsonl"),
        "init": str(folder / "config.json"),
        "tokenizer": str(folder / "tokenizer.json"),
        "out": str(folder / "out"),
        "steps": 5,
        "samples_per_rank": 4,
        "token_cap": 256,
        "truncate": True,
        "lr": 1e-3,
        "warmup_steps": 2,
        "timeout_minutes": LONG_S / 60,
    }
    return SftOptions(**wanted | changes)
