"""The code of README, first page and recipes is code of examples/, which tests/test_examples.py runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```(?:python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("page", "blocks"), [("README.md", 3), ("docs/index.md", 1), ("docs/recipes.md", 4), ("docs/read_policy.md", 2)]
)
def test_blocks_are_excerpts(page: str, blocks: int) -> None:
    found = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) == blocks
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").iterdir() if path.is_file()]
    for block in found:
        assert any(block in text for text in files), f"no file of examples/ has this block of {page}:\n{block}"


def test_readme_is_one_page_and_one_block_is_a_whole_file() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 130
    whole = (ROOT / "examples" / "loop.py").read_text(encoding="utf-8").partition('"""\n\n')[2]
    assert whole in _BLOCK.findall(text)
