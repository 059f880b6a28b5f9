"""Every page of the site in a browser, at a desktop's and a phone's width; links, search, screenshots."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote, urldefrag

import pytest
from browser import WIDTHS, Seen, look, watched
from playwright.sync_api import Browser, expect

from docs.figures.svg import PALETTE

SHOTS = (
    "index",
    "quickstart",
    "how_it_works",
    "split",
    "performance",
    "memory",
    "commands/odc-triton-train-sft",
    "models",
)


@pytest.fixture(scope="module", params=WIDTHS)
def seen(request: pytest.FixtureRequest, browser: Browser, site: str, built: Path) -> dict[str, Seen]:
    """What each page showed, by its address."""
    context = browser.new_context(viewport={"width": WIDTHS[request.param], "height": 900})
    pages = {}
    for path in sorted(built.rglob("*.html")):
        if "_downloads" not in path.parts:
            page = context.new_page()
            address = f"{site}/{path.relative_to(built).as_posix()}"
            pages[address] = look(page, address)
            page.close()
    context.close()
    return pages


def test_pages_have_no_faults(seen: dict[str, Seen]) -> None:
    assert len(seen) > 30
    faults = [f"{address}: {fault}" for address, page in seen.items() for fault in page.faults]
    assert not faults, "\n".join(faults)


def test_links_lead_somewhere(seen: dict[str, Seen], site: str) -> None:
    broken = set()
    for page, found in seen.items():
        for link in found.links:
            address, fragment = urldefrag(link)
            if not address.startswith(site):
                continue
            if address in seen:
                if fragment and unquote(fragment) not in seen[address].ids:
                    broken.add(f"{page}: {link} has no such heading")
            elif not _answers(address):
                broken.add(f"{page}: {link} is not there")
    assert not broken, "\n".join(sorted(broken))


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return answer.status == 200
    except URLError:
        return False


@pytest.mark.parametrize(
    ("words", "page", "heading"),
    [
        ("fully_shard", "/api/odc_triton.html#odc_triton.fully_shard", "odc_triton"),
        ("--token-cap", "/commands/odc-triton-", "odc-triton "),
        ("split sequences", "/split.html", "Split sequences"),
        ("deadline", "/api/odc_triton.html", "odc_triton"),
        ("out of memory", "/memory.html#out-of-memory", "Memory"),
        ("install", "/quickstart.html#install", "Quickstart"),
    ],
)
def test_search_opens_the_right_page(words: str, page: str, heading: str, browser: Browser, site: str) -> None:
    tab = browser.new_page()
    faults = watched(tab, site.removeprefix("http://"))
    tab.goto(f"{site}/index.html")
    tab.locator("input[name=q]").first.fill(words)
    tab.keyboard.press("Enter")
    expect(tab.locator("#search-results .search-summary")).to_contain_text("finished", timeout=20_000)
    first = tab.locator("#search-results li a").first
    assert page in first.evaluate("link => link.href")
    first.click()
    expect(tab.locator("h1").first).to_contain_text(heading)
    assert faults == []
    tab.close()


def test_the_sidebar_is_short_and_code_can_be_copied(browser: Browser, site: str) -> None:
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": 900})
    page.goto(f"{site}/quickstart.html")
    shown = [each for each in page.locator(".sidebar-tree a").all() if each.is_visible()]
    assert len(shown) <= 16
    assert shown[0].inner_text() == "Quickstart"
    assert page.locator("button.copybtn").count() == page.locator("div.highlight pre").count() > 3
    page.close()


def test_figures_follow_the_switch(browser: Browser, site: str, built: Path) -> None:
    """On the first page that has a figure: once dark, once light again, whatever the system likes."""
    name = next(path for path in sorted(built.glob("*.html")) if '<svg class="figure"' in path.read_text()).name
    page = browser.new_page(color_scheme="light", viewport={"width": WIDTHS["desktop"], "height": 900})
    page.goto(f"{site}/{name}")
    ink = page.locator("svg.figure text.ink").first
    found = []
    for _ in range(3):  # auto, dark, light
        found.append((page.locator("body").get_attribute("data-theme"), ink.evaluate("e => getComputedStyle(e).fill")))
        page.locator(".theme-toggle:visible").click()
    page.close()
    light, dark = (f"rgb({', '.join(str(n) for n in bytes.fromhex(colour[1:]))})" for colour in PALETTE["ink"])
    assert found == [("auto", light), ("dark", dark), ("light", light)]


def test_the_first_page_says_how_to_try_it_without_scrolling(browser: Browser, site: str) -> None:
    page = browser.new_page(viewport={"width": WIDTHS["desktop"], "height": 900})
    page.goto(f"{site}/index.html")
    command = page.locator("pre").first
    assert "odc-triton train sft" in command.inner_text()
    assert command.evaluate("e => e.getBoundingClientRect().bottom") < 900
    assert page.locator("svg.figure").first.evaluate("e => e.getBoundingClientRect().top") > 0
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_screenshots(width: str, scheme: str, browser: Browser, site: str, screenshots: Path) -> None:
    """For people to look at."""
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 900}, color_scheme=scheme)
    for name in SHOTS:
        page = context.new_page()
        page.goto(f"{site}/{name}.html")
        page.screenshot(path=screenshots / f"{name.replace('/', '-')}-{width}-{scheme}.png")
        page.close()
    context.close()
