"""Beside others' programs: installing odc-triton adds what is missing, and leaves what is there as it is."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tests.programs.harness import interpreter
from tests.support.deadlines import LONG_S

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = sorted(file.stem for file in (Path(__file__).parent / "environments").glob("*.sh"))


def _pip(environment: str, *words: str) -> Any:
    command = [interpreter(environment), "-m", "pip", "--disable-pip-version-check", *words]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=LONG_S).stdout)


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_upgrades_nothing(environment: str) -> None:
    listed = _pip(environment, "list", "--format", "json")
    there = {canonicalize_name(each["name"]): each["version"] for each in listed}
    words = ["install", "--quiet", "--dry-run", "--no-build-isolation", "--report", "-", str(ROOT)]
    would = [each["metadata"] for each in _pip(environment, *words)["install"]]
    versions = {canonicalize_name(each["name"]): each["version"] for each in would}
    assert versions.pop("odc-triton") == there["odc-triton"]
    replaced = {name: [there[name], version] for name, version in versions.items() if name in there}
    assert not replaced
