"""A headless browser that looks at pages: what fails to load, what runs over the edge, where links lead."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request, sync_playwright

WIDTHS = {"desktop": 1280, "phone": 390}
NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
# Elements that stick out of the window, but for what scrolls within a part of the page (one without its title: a theme
# may let the whole page scroll within a frame) and for drawers that wait outside.
_STICKING_OUT = """() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = e => getComputedStyle(e).overflowX !== 'visible' && !e.querySelector('h1');
  const apart = e => e && (scrolls(e) || getComputedStyle(e).position === 'fixed' || apart(e.parentElement));
  return [...document.body.querySelectorAll('*')]
    .filter(e => e.getBoundingClientRect().right > wide + 1 && !apart(e))
    .map(e => e.tagName + '.' + e.className + ': ' + e.textContent.replace(/\\s+/g, ' ').trim().slice(0, 60));
}"""
# At a desktop's width all code is shown whole.
_CODE_CUT_OFF = """() => document.documentElement.clientWidth < 1200 ? [] : [...document.querySelectorAll('pre')]
  .filter(e => e.scrollWidth > e.clientWidth)
  .map(e => e.textContent.split('\\n').reduce((a, b) => a.length < b.length ? b : a).trim())"""
# Text of figures that is too small to read, with the figure scaled to the page.
_TOO_SMALL = """() => [...document.querySelectorAll('svg.figure text')].map(e => {
    const svg = e.ownerSVGElement;
    const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    return [parseFloat(getComputedStyle(e).fontSize) * scale, e.textContent];
  }).filter(([size]) => size < 9).map(([size, text]) => `${size.toFixed(1)} px: ${text}`)"""
_FAULTS = {"runs over the edge": _STICKING_OUT, "code is cut off": _CODE_CUT_OFF, "text too small": _TOO_SMALL}
_FOUND = """() => ({
  ids: [...document.querySelectorAll('[id]')].map(e => e.id),
  links: [...document.querySelectorAll('a[href]')].map(e => e.href),
  images: [...document.images].filter(e => !(e.complete && e.naturalWidth > 0)).map(e => e.src.slice(0, 80)),
})"""


@dataclass(kw_only=True)
class Seen:
    """What one page showed. `faults` in words; `links` absolute, with their fragments."""

    faults: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)


@contextmanager
def opened() -> Iterator[Browser]:
    """The machine's Chromium. Raises RuntimeError if it has none."""
    paths = [path for path in map(shutil.which, NAMES) if path]
    if not paths:
        raise RuntimeError(f"none of {', '.join(NAMES)} is on PATH; install one: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=paths[0], args=_QUIET)
        yield browser
        browser.close()


def watched(page: Page, host: str) -> list[str]:
    """A list that grows by the page's errors, failed requests, and requests to another host than `host`."""
    faults: list[str] = []

    def requested(request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and address.netloc != host:
            faults.append(f"asks another host: {request.url}")

    page.on("console", lambda message: faults.append(f"console: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    page.on("request", requested)
    page.on("requestfailed", lambda request: faults.append(f"failed: {request.url}"))
    page.on("response", lambda answer: faults.append(f"{answer.status}: {answer.url}") if answer.status > 399 else None)
    return faults


def look(page: Page, address: str) -> Seen:
    """Opens the page at `address`, a URL, as wide as its window is."""
    faults = watched(page, urlsplit(address).netloc)
    page.goto(address, wait_until="load")
    page.locator("details").evaluate_all("all => all.forEach(e => e.open = true)")
    found = page.evaluate(_FOUND)
    for words, script in _FAULTS.items():
        faults += [f"{words}: {each}" for each in page.evaluate(script)[:3]]
    faults += [f"image not drawn: {each}" for each in found["images"]]
    return Seen(faults=faults, ids=set(found["ids"]), links=set(found["links"]))
