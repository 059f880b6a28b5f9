"""The standard library as a corpus."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from bench.stdlib_corpus import build_corpus, write_corpus
from odc_triton.data.sources import RecordFiles

TRAPS = '''
import this_module_does_not_exist

if True:
    @decorator(
        1,
    )
    async def fetch(
        url: str,
    ) -> bytes:
        """Fetch it.
\x0c
At column 0.
        """
        # why
        text = """
at column 0
        """

        def inner():
            """Inside another function."""
            return 1
        return inner()

class Outer:
    """A class."""

    field = 1

    def documented(self):
        r"""Says \\d."""
        return 2

    def undocumented(self):
        return 3

    class Inner: "On one line."

    def only_documented(self):
        """Nothing follows."""

def one_line(): "Doc."; return 4
def empty_doc():
    ""
    return 5
'''

FETCH = (
    '@decorator(\n    1,\n)\nasync def fetch(\n    url: str,\n) -> bytes:\n    """Fetch it.\n'
    '\x0c\nAt column 0.\n    """\n',
    '    # why\n    text = """\nat column 0\n    """\n\n    def inner():\n'
    '        """Inside another function."""\n        return 1\n    return inner()\n',
)
OUTER = (
    'class Outer:\n    """A class."""\n',
    "\n    field = 1\n\n    def documented(self):\n"
    '        r"""Says \\d."""\n        return 2\n\n    def undocumented(self):\n        return 3\n\n'
    '    class Inner: "On one line."\n\n    def only_documented(self):\n        """Nothing follows."""\n',
)
DOCUMENTED = ('def documented(self):\n    r"""Says \\d."""\n', "    return 2\n")


def function(name: str, text: str = "é") -> str:
    return f'def {name}():\n    """{text}"""\n    return "{text}"\n'


def test_corpus_of_a_tree_with_traps(tmp_path):
    for name, content in {
        "b.py": TRAPS,
        "a/z.py": function("z"),
        "a/copy_of_z.py": function("z") + "\n" + function("other"),
        "a.py": function("first").replace("\n", "\r\n"),
        "latin.py": b"# coding: latin-1\n" + function("latin").encode("latin-1"),
        "not_utf8.py": function("bad").encode("latin-1"),
        "unknown_coding.py": b"# coding: klingon\n",
        "syntax_error.py": function("bad") + "print 1\n",
        "nul.py": function("bad") + "\0",
        "deep.py": function("bad") + "-" * 100_000 + "1",
        "escape.py": 'def escape():\n    "Doc."\n    return "\\d"\n',
        "notes.txt": function("bad"),
        "test/t.py": function("bad"),
        "a/site-packages/s.py": function("bad"),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    records, summary = build_corpus(tmp_path)

    def pair(name: str) -> tuple[str, str]:
        return f'def {name}():\n    """é"""\n', '    return "é"\n'

    assert [(record["prompt"], record["completion"]) for record in records] == [
        pair("first"),
        FETCH,
        OUTER,
        DOCUMENTED,
        ('def escape():\n    "Doc."\n', '    return "\\d"\n'),
        pair("latin"),
        pair("z"),
        pair("other"),
    ]
    assert (summary.files, summary.skipped_files, summary.records, summary.duplicates) == (11, 5, 8, 1)

    path = tmp_path / "out" / "corpus.jsonl"
    assert write_corpus(path, tmp_path) == summary
    assert [{"prompt": record.prompt, "completion": record.completion} for record in RecordFiles([path])] == records


def test_corpus_of_nothing_is_refused(tmp_path):
    (tmp_path / "a.py").write_text("def f(): return 1\n")
    with pytest.raises(ValueError, match=r"has 1 Python files \(0 unreadable\) and no documented"):
        build_corpus(tmp_path)


@pytest.fixture(scope="module")
def some_corpus() -> list[dict[str, str]]:
    """A folder of the standard library, so that the test takes no second."""
    return build_corpus(Path(sysconfig.get_path("stdlib"), "asyncio"))[0]


def test_corpus_of_real_sources_is_source(some_corpus):
    assert len(some_corpus) > 100
    for record in some_corpus:
        (node,) = ast.parse(record["prompt"] + record["completion"]).body
        (asked,) = ast.parse(record["prompt"]).body
        assert ast.get_docstring(asked) == ast.get_docstring(node)
        assert asked.name == node.name
        assert len(asked.body) == 1 < len(node.body)
