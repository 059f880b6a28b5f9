"""The kinds of runs that kills.py disturbs: small models, their data, and the commands that train them."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from tests.support.families import FAMILIES
from tests.support.grpo_case import write_prompts
from tests.support.hybrids import CONFIGS
from tests.support.sft_case import QWEN2
from tests.support.sft_images import write_model, write_records

from ..provenance import ROOT

STEPS = 12
FEW = f"--steps {STEPS} --checkpoint-every 3"
MINUTES = 0.5  # until ranks give up one that is alive
_EXAMPLE = ROOT / "examples" / "fsdp2.py"  # its steps have no checkpoints
_LONG = 8  # times as many tokens as another record: worth splitting


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`command`: of `odc-triton`; FOLDER is that of `prepare`.

    `resumes`: it has --out and goes on from its checkpoints. `has_bits`: it promises the bits of a run that nothing
    disturbed. `interval`: how many steps its newest checkpoint may be behind. `hosts`: the ranks are on so many, which
    share no memory. `last`: what a program prints at its end.
    """

    command: str
    ranks: int = 2
    hosts: int = 1
    interval: int = 3
    resumes: bool = True
    has_bits: bool = True
    last: str = ""

    def arguments(self, folder: Path, out: Path) -> list[str]:
        name, *words = self.command.replace("FOLDER", str(folder)).split()
        given = ["--ranks", str(self.ranks)] + (["--out", str(out), "--resume", "auto"] if self.resumes else [])
        # What follows a program's name are its own options.
        return [name, *given, *words] if name == "run" else [name, *words, *given]


_USUAL = f"{FEW} --lr 1e-2 --warmup-steps 2 --timeout-minutes {MINUTES}"
_TOKENIZER = "--tokenizer FOLDER/tokenizer.json"
_SFT = f"train sft --exact --token-cap 256 --truncate --samples-per-rank 3 {_USUAL} {_TOKENIZER}"
_TEXT = f"{_SFT} --data FOLDER/data.jsonl"
_LOW_RANK = "--model FOLDER/start --lora-rank 4"
_ROLLOUT = "--reward tests.rewards:vowels --token-cap 128 --prompts-per-rank 2 --generations 3 --max-new-tokens 12"
_ROLLOUT += " --overlap-rollout on"
_PAIRS = "--exact --token-cap 256 --pairs-per-rank 2"
_IMAGES = "--exact --token-cap 128 --samples-per-rank 3 --tokenizer FOLDER/model"

KINDS: dict[str, Kind] = {
    "sft": Kind(command=f"{_TEXT} --init FOLDER/config.json --eval-fraction 0.1 --eval-every 4 --keep-best"),
    "background checkpoints": Kind(
        command=f"{_TEXT} --init FOLDER/config.json --checkpoint-background",
        interval=6,  # the one before it, while it is written
    ),
    "split": Kind(command=f"{_SFT} --data FOLDER/long.jsonl --init FOLDER/config.json --split-sequences"),
    "prefixes": Kind(command=f"{_SFT} --data FOLDER/alike.jsonl --init FOLDER/config.json --share-prefixes"),
    "hybrids": Kind(command=f"{_SFT} --data FOLDER/long.jsonl --init FOLDER/hybrid.json --split-sequences"),
    "experts": Kind(command=f"{_TEXT} --init FOLDER/experts.json --replace-layers"),
    "packed base": Kind(command=f"{_TEXT} {_LOW_RANK} --quantize nf4"),
    "sweep": Kind(command="sweep FOLDER/sweep.yaml", interval=2),
    "automatic": Kind(command=f"run --strict {_EXAMPLE}", resumes=False, has_bits=False, last="step 4 loss"),
    "grpo overlapped": Kind(
        command=f"train grpo --data FOLDER/prompts.jsonl --model FOLDER/start {_ROLLOUT} {_USUAL} {_TOKENIZER}",
        has_bits=False,  # packs are of what has come
    ),
    "dpo": Kind(command=f"train dpo --data FOLDER/pairs.jsonl --model FOLDER/start {_PAIRS} {_USUAL} {_TOKENIZER}"),
    "images": Kind(command=f"train sft --data FOLDER/learned.jsonl --init FOLDER/model/config.json {_IMAGES} {_USUAL}"),
    "two hosts": Kind(
        command=f"{_SFT} --data FOLDER/long.jsonl --init FOLDER/config.json --split-sequences", ranks=4, hosts=2
    ),
}


def prepare(folder: Path) -> None:
    """Writes models, tokenizer and data of all kinds into `folder`."""
    write_prompts(folder, config={"max_position_embeddings": 1024})
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    texts = [record["completion"] for record in records]
    long = [
        {"prompt": record["prompt"], "completion": " ".join(texts[number : number + _LONG * (number % 3 == 0) + 1])}
        for number, record in enumerate(records)
    ]
    beginnings = itertools.cycle(record["prompt"] for record in records[:4])
    alike = [record | {"prompt": f"{next(beginnings)}\n{record['prompt'][:9]}"} for record in records]
    others = random.Random(0).sample(texts, len(texts))
    pairs = [
        {"prompt": record["prompt"], "chosen": text, "rejected": other}
        for record, text, other in zip(records, texts, others, strict=True)
        if text != other
    ]
    for name, lines in (("long", long), ("alike", alike), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    configs: dict[str, dict[str, Any]] = {"hybrid": CONFIGS["qwen3_5"], "experts": _experts()}
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(QWEN2 | {"max_position_embeddings": 1024} | config))
    torch.manual_seed(0)
    write_model(folder / "model", "qwen2_5_vl")
    write_records(folder, "learned", asked=4, text=8)
    sweep = {"model": "start", "data": "data.jsonl", "tokenizer": "tokenizer.json"}
    given = {name: str(folder / file) for name, file in sweep.items()} | _SWEEP
    (folder / "sweep.yaml").write_text(yaml.safe_dump(given))


_SWEEP: dict[str, Any] = {"token_cap": 256, "truncate": True, "samples_per_rank": 4, "lora_rank": 4, "steps": 8}
_SWEEP |= {"checkpoint_every": 2, "timeout_minutes": MINUTES, "eval_fraction": 0.1, "grid": {"lr": [1e-3]}}
_SWEEP["runs"] = [{"seed": 1}, {"seed": 2}, {"name": "wide", "lora_rank": 8, "steps": STEPS}]


def _experts() -> dict[str, Any]:
    return {"model_type": "qwen3_moe", **FAMILIES["Qwen3Moe"].sizes}
