"""The page "Try lengths like yours" in a browser: by keyboard, from a server and from file://, and without scripts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from browser import WIDTHS, look
from playwright.sync_api import Browser, Page, expect

# Of each timeline, by rank and state, the units that are drawn.
_DRAWN = """svgs => svgs.map(svg => [...svg.querySelectorAll('path')].map(path => [path.getAttribute('class'),
  [...path.getAttribute('d').matchAll(/h(\\d[\\d.]*)/g)].reduce((sum, [, wide]) => sum + Number(wide), 0)]))"""


@pytest.fixture(scope="module")
def cells(built: Path) -> dict[str, dict]:
    text = (built / "_static" / "lengths_data.js").read_text(encoding="utf-8")
    assert len(text) <= 1_000_000
    return json.loads(text.removeprefix("window.LENGTHS = ").removesuffix(";\n"))["cells"]


def shows(page: Page, cell: dict) -> None:
    said, heads = page.locator("#lengths [role=status]"), page.locator("#lengths .way").all()
    theirs, mini, split = ((way["step"], way["idle"]) for way in cell["ways"])
    for head, (step, idle) in zip(heads, (theirs, mini, split), strict=True):
        expect(head).to_contain_text(f": {step} s per step, {idle} idle")
    expect(heads[0]).to_contain_text(cell["ways"][0]["name"])
    for step, idle in (theirs, mini, *([split] if split != mini else [])):
        expect(said).to_contain_text(f"{step} s per step, {idle} idle")
    assert ("adds nothing" in said.inner_text()) == (split == mini)
    assert ("no gain, as" in said.inner_text()) == (float(cell["ways"][1]["ratio"]) <= 1.02)
    assert page.locator("#lengths pre").inner_text().strip() == cell["command"]
    drawn = page.locator("#lengths .timelines svg").evaluate_all(_DRAWN)
    for way, paths in zip(cell["ways"], drawn, strict=True):
        spans, wide = Counter(), Counter()
        for state, tenths in re.findall(r"([a-z])(\d+)", "".join(way["rows"])):
            spans[state] += int(tenths)
        for state, width in paths:
            wide[state[0]] += width
        shares = ({state: each / sum(of.values()) for state, each in of.items()} for of in (spans, wide))
        assert next(shares) == pytest.approx(next(shares), abs=0.01)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("where", ["served", "file"])
def test_chosen_by_keyboard(
    where: str, width: str, browser: Browser, site: str, built: Path, cells: dict, screenshots: Path
) -> None:
    page = browser.new_page(viewport={"width": WIDTHS[width], "height": 900})
    address = f"{site}/lengths.html" if where == "served" else (built / "lengths.html").as_uri()
    faults = look(page, address).faults  # grows by a request to another host
    shows(page, cells["longalign 8 4"])
    assert float(cells["longalign 8 4"]["ways"][1]["ratio"]) > 1.1, "it opens where there is something to gain"
    page.locator("#lengths input[value=longalign]").focus()
    page.keyboard.press("ArrowRight")  # SWE-Smith
    shows(page, cells["swe-smith 8 4"])
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")  # 16 ranks
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowLeft")  # 2 samples
    page.keyboard.press("ArrowLeft")  # 1 sample
    shows(page, cells["swe-smith 16 1"])
    page.keyboard.press("ArrowLeft")  # round to 8
    shows(page, cells["swe-smith 16 8"])
    assert page.get_by_label("SWE-Smith").count() == page.get_by_role("group", name="Ranks (GPUs)").count() == 1
    if where == "served":
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=screenshots / f"lengths-{width}-{scheme}.png", full_page=True)
    assert faults == []
    page.close()


def test_without_scripts_it_is_a_table(browser: Browser, site: str, cells: dict) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/lengths.html")
    rows = page.locator("details tbody tr")
    assert rows.count() == len(cells)
    assert rows.first.is_visible()
    for row, cell in zip(rows.all_inner_texts(), cells.values(), strict=True):
        assert row.split()[-6:] == [way[part] for way in cell["ways"] for part in ("step", "idle")]
    context.close()
