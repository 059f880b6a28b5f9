"""Others' programs run only where they are asked for: make test-programs. The last lines say what they did."""

from __future__ import annotations

import json
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.programs.harness import RESULTS

_START = pytest.StashKey[float]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked_for = any("programs" in Path(word.partition("::")[0]).parts for word in config.args)
    return None if asked_for else True


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[_START] = time.time()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """After pytest's own last line."""
    done = yield
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or _START not in session.stash:  # a worker, or a session that was not asked for programs
        return done
    recorded = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    print()
    for each in recorded:
        if each["at"] >= session.stash[_START]:
            print(_line(each))
    for reason in sorted({report.longrepr[2] for report in reporter.stats.get("skipped", [])}):
        print(reason.removeprefix("Skipped: "))
    return done


def _line(each: dict[str, Any]) -> str:
    packages = " ".join(f"{name} {version}" for name, version in each["versions"].items())
    return (
        f"{each['program']:60} difference {each['difference']:.1e}, "
        f"{each['seconds_plain']:.0f} s without, {each['seconds_odc']:.0f} s with; "
        f"{each['minibatches']} minibatches, {each['waits']} waits; {packages}"
    )
