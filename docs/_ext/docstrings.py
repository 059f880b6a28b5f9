"""Our docstrings are plain prose; autodoc takes reStructuredText. This turns the one into the other.

A docstring has paragraphs, lists (`- …`) and code (indented further than the text). Descriptions of parameters begin a
line or follow a sentence: `name: text` or `name, other: text`. They, and sentences that begin with "Returns" or
"Raises", become fields at the end, as other sites have them; but the first sentence stays what it is.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from docutils.nodes import Element, document, reference
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

# Packages of public names; a name's page is the one whose directives name it.
_DOORS = (
    "odc_triton",
    *(
        f"odc_triton.{name}"
        for name in ("balance", "checkpoint", "data", "hf", "nn", "objectives", "optim", "simulate")
    ),
    "odc_kernels.ops",
)
_MARKS = re.compile(r"`+(?P<code>.+?)`+|docs/(?P<page>\w+)\.md")
_ERROR = r"[A-Z]\w*(?:Error|Failed|Lost|Exceeded|Differs?|Corrupt|Unavailable|Unsupported|ToRepeat|Interrupted)"
_ERRORS = re.compile(
    rf"(?:^|[;,] (?:and |or )?| and | or )({_ERROR}(?:(?:, | or | and |, or ){_ERROR})*)(?=,? \w|\.?$)"
)
_SENTENCE = re.compile(r"(?<=\.)\s+(?=[A-Z`\[(])")


@dataclass(kw_only=True)
class _Fields:
    """What a docstring says in fields: texts by the parameters' names, and by the names of other fields."""

    parameters: list[tuple[str, str]] = field(default_factory=list)
    others: list[tuple[str, str]] = field(default_factory=list)

    def to_rst(self) -> str:
        shown = [f"{names} \u2013 {inline(text)}" for names, text in self.parameters]
        parts = [f":Parameters: {shown[0]}"] if len(shown) == 1 else []
        if len(shown) > 1:
            parts = [":Parameters:", *(f"    * {each}" for each in shown)]
        others = sorted(self.others, key=lambda each: each[0] != "returns")
        return "\n".join([*parts, *(f":{name}: {inline(text)}" for name, text in others)])

    def add_errors(self, sentence: str) -> None:
        """`sentence`: what follows "Raises", as "ValueError for a, TypeError for b"."""
        found = [*_ERRORS.finditer(sentence)]
        if not found or found[0].start():
            self.others.append(("raises", sentence))
            return
        ends = [each.start() for each in found[1:]] + [len(sentence)]
        for each, end in zip(found, ends, strict=True):
            when = sentence[each.end() : end].strip(" .,")
            self.others.append((f"raises {each[1]}", when and f"{when}."))


def to_rst(text: str, parameters: Sequence[str] = ()) -> str:
    """The docstring `text`, whose function has these `parameters`, as reStructuredText."""
    fields = _Fields()
    blocks = re.split(r"\n\s*\n", text.expandtabs().strip("\n"))
    prose = [_block(block, parameters, fields, first=index == 0) for index, block in enumerate(blocks)]
    return "\n\n".join(part for part in (*prose, fields.to_rst()) if part)


def _block(text: str, parameters: Sequence[str], fields: _Fields, *, first: bool) -> str:
    if all(line.startswith("    ") for line in text.split("\n")):
        return f"::\n\n{text}"
    before, *items = [_prose(part, parameters, fields, first=first) for part in re.split(r"(?:^|\n)- ", text)]
    return "\n\n".join(part for part in (before, "\n".join(f"* {item}" for item in items)) if part)


def _prose(text: str, parameters: Sequence[str], fields: _Fields, *, first: bool) -> str:
    """`text` without its fields, which are added to `fields`."""
    name = rf"\*{{0,2}}`?\*{{0,2}}(?:{'|'.join(map(re.escape, parameters)) or '(?!)'})`?"
    start = re.compile(
        rf"(?:^|\n *|(?<=[.;,)][ \n]))(?:(?P<names>{name}(?:,\s+{name})*):\s+|(?P<verb>Returns|Raises)\s+)", re.S
    )
    found = [each for each in start.finditer(text) if each["names"] or not (first and each.start() == 0)]
    found = [each for each in found if each["names"] or re.search(r"(^|\.\s*)$", text[: each.start()])]
    kept = [text[: found[0].start() if found else len(text)]]
    ends = [each.start() for each in found[1:]] + [len(text)]
    for each, end in zip(found, ends, strict=False):
        said = " ".join(text[each.end() : end].split())
        if each["names"]:
            names = ", ".join(f"**{one.strip(' `*' + chr(10))}**" for one in each["names"].split(","))
            fields.parameters.append((names, said.rstrip(",;")))
            continue
        if each["verb"] == "Returns" and each.start() == 0:
            fields.others.append(("returns", said[0].upper() + said[1:]))
            continue
        sentence, *rest = _SENTENCE.split(said, maxsplit=1)
        kept += rest
        if each["verb"] == "Raises":
            fields.add_errors(sentence)
        else:
            fields.others.append(("returns", sentence[0].upper() + sentence[1:]))
    return inline(" ".join(" ".join(kept).split()))


@cache
def public() -> dict[str, str]:
    """By name, the path under which users import it."""
    return {name: f"{door}.{name}" for door in reversed(_DOORS) for name in importlib.import_module(door).__all__}


def inline(text: str) -> str:
    """Text in which `code` is code, or a link if it is a public name that can't be a parameter's, the address of a page
    is a link to it, and nothing else means anything.
    """
    out, end = "", 0
    for mark in _MARKS.finditer(text):
        page, code = mark["page"], mark["code"]
        name = (code or "").removeprefix("odc_triton.").removesuffix("()")
        if page:
            shown = f":doc:`/{page}`"
        elif name in public() and re.search("[A-Z_]", name):
            shown = f":py:obj:`{code} <{public()[name]}>`"
        else:
            shown = f"``{code}``"
        out += f"{_escape(text[end : mark.start()])}\\ {shown}\\ "  # escaped spaces end markup and don't show
        end = mark.end()
    return out + _escape(text[end:])


def _escape(text: str) -> str:
    return re.sub(r"([\\*_|`<>\[\]])", r"\\\1", text)


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    # What a package's own docstring says is said on its page, for readers of the API.
    lines[:] = [] if what == "module" else to_rst("\n".join(lines), _parameters(obj)).split("\n")


def shorten(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """A signature that Sphinx can read: dataclasses show a field's factory as `<factory>`. None of a class that users
    don't make, whose constructor takes private ones.
    """
    if what == "class" and re.search(r"\b_[A-Z]", signature or ""):
        return "", None
    return (signature and signature.replace("<factory>", "...")), returned


def link(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: Element) -> reference | None:
    """Types of signatures, which are those of the modules that define them, lead to the public names."""
    target = public().get(node["reftarget"].rpartition(".")[2], "")
    objects = env.domains.python_domain.objects
    if node["refdomain"] != "py" or target == node["reftarget"] or target not in objects:
        return None
    return env.domains.python_domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode)


def show_public(app: Sphinx, tree: document, page: str) -> None:
    """Links to names say when pointed at where users find them, not what autodoc calls canonical."""
    for each in tree.findall(reference):
        if each.get("reftitle", "").startswith("odc_"):
            each["reftitle"] = each.get("refid") or each["refuri"].rpartition("#")[2]


def _parameters(obj: object) -> list[str]:
    try:
        return [*inspect.signature(obj).parameters]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", shorten)
    app.connect("missing-reference", link)
    app.connect("doctree-resolved", show_public)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
