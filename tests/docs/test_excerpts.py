"""The code of README, first page and recipes is code of examples/, which tests/test_examples.py runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from odc_triton.jobs.data.tokenizer import to_transformers
from tests.support.deadlines import LONG_S
from tests.support.sft_case import write_case

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(?:python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "blocks"), [("README.md", 2), ("docs/index.md", 1), ("docs/recipes.md", 4), ("docs/read_policy.md", 2)]
)
def test_blocks_are_excerpts(page: str, blocks: int) -> None:
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) == blocks
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").iterdir() if path.is_file()]
    for block in found:
        imports, _, code = block.rpartition("\n\n") if block.startswith("from odc_triton import") else ("", "", block)
        assert any(imports in text and code in text for text in files), (
            f"no file of examples/ has this block of {page}:\n{block}"
        )


def test_readme_is_one_page_and_one_block_is_a_whole_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    whole = (ROOT / "examples" / "loop.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert whole in _BLOCK.findall(text)


# By command: what it leaves in out/.
COMMANDS = {
    "train sft": "run/model",
    "new dpo": None,
    "train dpo": "dpo/model",
    "train grpo": "rl/model",
    "run ": None,
    "profile": "profile",
}


@pytest.mark.slow
def test_the_commands_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    """But for the model, which is small and without a hub, and the ranks, of which there are two."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    lines = [line.partition("#")[0] for kind, block in blocks if not kind for line in block.splitlines()]
    assert lines.pop(0).strip() == 'pip install ".[plot]"'
    assert [next(each for each in COMMANDS if f"odc-triton {each}" in line) for line in lines] == list(COMMANDS)
    assert text.index("train sft") < text.index("\n!["), "it comes first"
    write_case(tmp_path, config={"max_position_embeddings": 1024})
    (tmp_path / "train.jsonl").write_text((tmp_path / "data.jsonl").read_text())
    rows = [{"question": f"{n} + 1 =", "answer": f"#### {n + 1}"} for n in range(40)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    shutil.copy(ROOT / "examples" / "fsdp2.py", tmp_path / "train.py")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path / "small")
    to_transformers(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))).save_pretrained(tmp_path / "small")
    there = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ODC_TUNED": str(tmp_path)}
    edited = r"sed -i 's/^model:.*/model: small/; s/^data:.*/data: pairs.jsonl/' dpo.yaml"
    for line, (name, left) in zip(lines, COMMANDS.items(), strict=True):
        line = line.replace("--ranks 8", "--ranks 2").replace("Qwen/Qwen3-8B", "small").replace("MODEL", "small")
        line += f"&& {edited}" * (name == "new dpo")
        done = subprocess.run(
            ["bash", "-euc", line],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LONG_S,
            env=os.environ | there | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, line + done.stdout + done.stderr
        assert left is None or (tmp_path / "out" / left).is_dir(), name
