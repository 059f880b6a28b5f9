"""The reports of real small runs in a browser: table, timeline, curves, at a desktop's and a phone's width."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from browser import WIDTHS, look
from playwright.sync_api import Browser

from tests.support.grpo_case import VOWELS, write_prompts

ROOT = Path(__file__).parents[2]
SHARED = (
    *("--init", "config.json", "--tokenizer", "tokenizer.json", "--out", "out", "--token-cap", "256"),
    *("--steps", "6", "--ranks", "2", "--lr", "1e-2", "--warmup-steps", "0"),
)
JOBS = {
    "sft": (
        *("--data", "data.jsonl", "--truncate", "--samples-per-rank", "2"),
        *("--eval-fraction", "0.2", "--eval-every", "2"),
    ),
    "grpo": ("--data", "prompts.jsonl", "--reward", VOWELS, "--generations", "2", "--max-new-tokens", "8"),
}
CURVE = {"sft": "loss, eval_loss.", "grpo": "reward."}  # how an image's text begins

# Of each image its text, and how many colours it has; 0 if a part of it was not drawn.
_COLOURS = """images => images.map(image => {
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
  const context = canvas.getContext('2d');
  context.drawImage(image, 0, 0);
  const colours = new Set(new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer));
  return [image.alt, [...colours].every(colour => colour >>> 24 === 255) ? colours.size : 0];
})"""


@pytest.fixture(scope="module", params=JOBS)
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job's name and its report."""
    folder = write_prompts(tmp_path_factory.mktemp(request.param))
    command = [sys.executable, "-m", "odc_triton.tools.cli", "train", request.param, *SHARED, *JOBS[request.param]]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, folder / "out" / "report.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_report_shows_what_the_run_did(
    report: tuple[str, Path], width: str, browser: Browser, screenshots: Path
) -> None:
    job, path = report
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900})
    seen = look(page, path.as_uri())
    assert seen.faults == []
    assert page.locator("table tbody tr").count() > 0
    assert all(page.locator("table").first.locator("td").all_inner_texts())
    drawn = page.locator("img").evaluate_all(_COLOURS)
    assert all(colours > 10 for _, colours in drawn)
    words = [alt for alt, _ in drawn]
    assert any(alt.startswith("Timelines.") and "idle" in alt for alt in words)
    assert any(alt.startswith(CURVE[job]) and " ends at " in alt for alt in words)
    assert job != "sft" or any("eval_loss ends at" in alt for alt in words)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=screenshots / f"report-{job}-{width}-{scheme}.png", full_page=True)
    page.close()
