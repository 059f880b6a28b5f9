"""The pages without a site: every page is in a table of contents, and every relative link leads somewhere."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

import odc_triton

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MADE = "commands"  # a folder of pages that the build writes
PARTS = ("tables", MADE)  # folders that are no pages of their own, or not in the repository
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in PARTS)
LINKING = [*PAGES, *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"))]
_FENCE = re.compile(r"^(`{3,})(.*?)^\1`*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")


def _prose(page: Path) -> str:
    """The page without its blocks and spans of code."""
    return re.sub(r"`[^`]*`", "`code`", _FENCE.sub("", page.read_text(encoding="utf-8")))


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as the code host and the site make them."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    names = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)]
    return {
        name if not names[:index].count(name) else f"{name}-{names[:index].count(name)}"
        for index, name in enumerate(names)
    }


def _listed(page: Path) -> Iterator[str]:
    """The pages, relative to docs/, that the page's tables of contents name."""
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.split("\n"):
            if line and not line.startswith(":"):
                yield (page.parent.relative_to(DOCS) / line).as_posix()


def _broken(page: Path) -> list[str]:
    found = []
    for target in _LINK.findall(_prose(page)):
        address, _, heading = target.partition("#")
        if re.match(r"https?:", target):
            continue
        path = (page.parent / address).resolve() if address else page
        if path.relative_to(ROOT).parts[:2] == ("docs", MADE):
            continue  # `make docs` sees these
        if not path.exists():
            found.append(f"{target}: there is no such file")
        elif heading and heading not in _headings(path):
            found.append(f"{target}: {path.name} has no such heading")
    return found


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = {entry for page in PAGES for entry in _listed(page)}
    names = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES} - {"index"}
    assert listed >= names, "add them to a toctree of docs/index.md or docs/api/index.md"
    assert listed - names == {f"{MADE}/index"}, "a toctree names pages that are not there"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS], ids=lambda page: page.stem)
def test_a_page_begins_with_a_sentence(page: Path) -> None:
    title, _, rest = page.read_text(encoding="utf-8").partition("\n\n")
    if page.stem not in ("changelog", "contributing"):  # they include a file
        assert re.fullmatch(r"# .+", title)
        assert re.match(r"[A-Z]|`[^`]", rest), f"{page.name}: say first whom the page is for"


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert not _broken(page)


def test_pages_that_code_names_exist() -> None:
    named = {
        (path.relative_to(ROOT).as_posix(), name)
        for folder in ("odc_triton", "kernels", "bench", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\bdocs/[\w/]+\.md", path.read_text(encoding="utf-8"))
    }
    assert named
    assert {(path, name) for path, name in named if not (ROOT / name).exists()} == set()


def test_public_names_are_in_the_api() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "api").glob("*.md"))
    described = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", pages, re.M))
    assert {"odc_kernels.ops", "odc_triton.nn"} <= described
    assert {*odc_triton.__all__} - described == {"MixedPrecisionPolicy"}, "the latter is torch's"
    packages = {f.parent.name for f in (ROOT / "odc_triton").glob("*/__init__.py") if "lazy_names(" in f.read_text()}
    missing = {name for name in packages if f"odc_triton.{name}" not in described}
    assert missing == {"sharding"}, "add a page to docs/api; the names of sharding are those of odc_triton"


def _doors() -> Iterator[tuple[str, str, Any]]:
    """Each public name: its package, the name, and what it is; optional packages' are left out."""
    packages = [f"odc_triton.{f.parent.name}" for f in (ROOT / "odc_triton").glob("*/__init__.pyi")]
    for package in ("odc_triton", "odc_kernels.ops", *sorted(packages)):
        module = importlib.import_module(package)
        yield from ((package, name, getattr(module, name)) for name in module.__all__)


def _public() -> Iterator[tuple[str, Any]]:
    """Public functions and classes of ours, and what these have."""
    for package, name, found in _doors():
        if getattr(found, "__module__", "").startswith("odc_"):
            yield f"{package}.{name}", found
            members = vars(found).items() if inspect.isclass(found) else ()
            yield from ((f"{package}.{name}.{key}", value) for key, value in members if not key.startswith("_"))


def test_public_docstrings_stand_alone() -> None:
    """A reader of the site sees neither our notes nor our files."""
    inside = re.compile(r"\[Note: |\b\w+\.py\b|\b[a-z]\w*/ *\)|\(see ")
    docs = {name: doc for name, found in _public() if isinstance(doc := getattr(found, "__doc__", None), str)}
    assert len(docs) > 200
    assert {name: found[0] for name, doc in docs.items() if (found := inside.search(doc))} == {}


def test_public_parameters_are_described() -> None:
    """Each is named in the docstring; no default is shown by its address."""
    missing = {}
    for _, name, found in _doors():
        if not getattr(found, "__module__", "").startswith("odc_") or not callable(found):
            continue
        is_made = not inspect.isclass(found) or not issubclass(found, (Exception, Protocol))
        if not is_made or name in ("PolicyOffer", "MemoryPlan", "Outcome"):  # not by users
            continue
        signature = inspect.signature(found)
        missing[name] = signature.parameters.keys() - {*re.findall(r"\w+", found.__doc__ or "")}
        assert " at 0x" not in str(signature), name
    assert len(missing) > 100
    assert {name: parameters for name, parameters in missing.items() if parameters} == {}
