"""The code of README, first page and recipes is code of examples/, which tests/test_examples.py runs."""

from __future__ import annotations

import json
import os
import re
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


COMMANDS = {"pip": None, "train sft": "run/model", "train grpo": "rl/model", "profile": "profile", "tune": None}


@pytest.mark.slow
def test_the_commands_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    """But for the model, which is small, and so are the data; the two commands come before any heading."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    assert [each for each in COMMANDS if any(each in line for line in lines)] == list(COMMANDS)
    assert text.index("train sft") < text.index("\n![")
    write_case(tmp_path, config={"max_position_embeddings": 1024})
    (tmp_path / "train.jsonl").write_text((tmp_path / "data.jsonl").read_text())
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n} + 1 ="}) + "\n" for n in range(40)))
    (tmp_path / "my_rewards.py").write_text(
        "def exact(completions, **_):\n    return [len(c) % 7 for c in completions]\n"
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    model.save_pretrained(tmp_path / "small")
    to_transformers(Tokenizer.from_file(str(tmp_path / "tokenizer.json"))).save_pretrained(tmp_path / "small")
    for line in lines:
        name = next(each for each in COMMANDS if each in line)
        if name == "pip":
            continue
        words = line.partition("#")[0].replace("MODEL", "small").split()
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "ODC_TUNED": str(tmp_path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "odc_triton.tools.cli", *words[1:]]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, env=environment)
        assert done.returncode == 0, line + done.stdout + done.stderr
        assert COMMANDS[name] is None or (tmp_path / "out" / COMMANDS[name]).is_dir(), line
