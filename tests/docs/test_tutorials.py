"""The tutorials run as they stand: their blocks in order, in a folder of their own that has examples/.

`bash` and `python` blocks run; a block after a line that ends in "save as `NAME`:" is written to that file. A `text`
block is what the block before prints on stdout, these lines in this order; `…` stands for any text, alone for any
lines. A `diff` block is what makes one file of examples/ another. Words after the kind loosen it: `numbers-vary`,
`words-vary` (as many lines); `right>=90` bounds the first number after a word, on the page and in the output.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for page in (ROOT / "docs" / "tutorials").glob("*.md") if page.stem != "index")
FIRST = {"grpo": "chats"}  # a page, and the one that runs before it in the same folder
_BLOCK = re.compile(
    r"(?:[Ss]ave as `(?P<file>[\w./]+)`:\n\n)?^```(?P<kind>\w+)(?P<words>.*)\n(?P<text>(?s:.*?))^```$", re.M
)
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?"


def blocks(page: Path) -> Iterator[re.Match[str]]:
    return _BLOCK.finditer(page.read_text(encoding="utf-8"))


def mistakes(shown: str, words: str, printed: str) -> list[str]:
    """How `printed` differs from what the page shows."""
    found = []
    for word, sign, bound in re.findall(r"(\w+)(>=|<=)([\d.]+)", words):
        for where, text in (("the page", shown), ("the output", printed)):
            number = re.search(rf"\b{word}\W+({_NUMBER})", text)
            value = float(number[1].replace(",", "")) if number else float("nan")
            if not (value >= float(bound) if sign == ">=" else value <= float(bound)):
                found.append(f"{where} has {word} {value}, which is not {sign} {bound}")
    lines, pattern = printed.rstrip("\n").split("\n"), ""
    if "words-vary" in words:
        return found + (
            [] if len(lines) == len(shown.splitlines()) else [f"{len(lines)} lines are printed:\n{printed}"]
        )
    for line in shown.splitlines():
        if line.strip() == "…":
            pattern += r"(?s:.*\n)?"
            continue
        parts = re.split(_NUMBER, line.rstrip()) if "numbers-vary" in words else [line.rstrip()]
        pattern += _NUMBER.join(map(re.escape, parts)).replace("…", ".*") + r"[ \t]*\n"
    return found + (
        [] if re.fullmatch(pattern, "\n".join(lines) + "\n") else [f"the page shows\n{shown}and not\n{printed}"]
    )


def run_page(page: Path, folder: Path) -> None:
    """Runs a page's blocks; fails where a block fails or prints something else."""
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    printed = ""
    for block in blocks(page):
        if block["file"]:
            (folder / block["file"]).write_text(block["text"])
        elif block["kind"] in ("bash", "python"):
            start = ["bash", "-euo", "pipefail"] if block["kind"] == "bash" else [sys.executable]
            (folder / "block").write_text(block["text"])
            done = subprocess.run(
                [*start, "block"],
                cwd=folder,
                env=os.environ | place | offline,
                capture_output=True,
                text=True,
                timeout=LONG_S,
            )
            assert done.returncode == 0, block["text"] + done.stdout + done.stderr
            printed = done.stdout
        elif block["kind"] == "text":
            wrong = mistakes(block["text"], block["words"], printed)
            assert not wrong, f"{page.name}: " + "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem not in (*FIRST.values(), "fsdp2")], ids=lambda page: page.stem
)
def test_a_tutorial_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in (FIRST.get(page.stem), page.stem):
        if name is not None:
            run_page(page.with_stem(name), tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_tutorial_shows_are_those_of_examples(page: Path) -> None:
    kinds = [block["kind"] for block in blocks(page)]
    assert {"bash", "text"} <= {*kinds} <= {"bash", "python", "text", "diff"}, "other kinds are not run"
    for block in blocks(page):
        if block["file"] and (ROOT / block["file"]).exists():
            assert block["text"] == (ROOT / block["file"]).read_text(encoding="utf-8"), block["file"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_diff_in_a_tutorial_turns_one_file_into_another(page: Path) -> None:
    for block in blocks(page):
        if block["kind"] == "diff":
            before, after = re.findall(r"^(?:---|\+\+\+) (.+)$", block["text"], re.M)
            lines = [(ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True) for name in (before, after)]
            assert block["text"] == "".join(difflib.unified_diff(*lines, before, after, n=1))


@pytest.mark.slow
def test_the_loops_of_the_fsdp2_tutorial_train_the_same_and_fsdp2_idles_most(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    run_page(ROOT / "docs" / "tutorials" / "fsdp2.md", tmp_path)
    texts = [(tmp_path / "out" / "migrate" / f"{run}.txt").read_text() for run in ("FSDP2", "ODC", "balanced")]
    losses = [[float(loss) for loss in re.findall("loss (.+)", text)] for text in texts]
    assert len(losses[0]) == 5
    assert all(max(step) - min(step) < 1e-5 for step in zip(*losses, strict=True))
    idle = [sum(float(share) for share in re.findall(r"rank \d idle ([\d.]+)%", text)) for text in texts]
    assert idle[0] > max(idle[1:])
