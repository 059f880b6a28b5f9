"""The standard library as a corpus."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import pytest

from bench.stdlib_corpus import build_corpus


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
