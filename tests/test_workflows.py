"""Files that run elsewhere, on GitHub and in Docker, name what is here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


def _workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "least"), [("ci", 4), ("release", 1)])
def test_commands_of_a_workflow_exist(name: str, least: int) -> None:
    commands = []
    for job in _workflow(name)["jobs"].values():
        for row in job.get("strategy", {"matrix": {"include": [{}]}})["matrix"]["include"]:
            for step in job["steps"]:
                text = step.get("run", "")
                for key, value in row.items():
                    text = text.replace(f"${{{{ matrix.{key} }}}}", value)
                commands += text.splitlines()
    assert len(commands) >= least
    for command in commands:
        first, *words = shlex.split(command)
        if first == "make":
            subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        else:
            assert os.access(ROOT / first, os.X_OK), command


def test_every_supported_python_is_tested() -> None:
    tested = [row["python"] for row in _workflow("ci")["jobs"]["test"]["strategy"]["matrix"]["include"]]
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert tested == classifiers


def test_only_a_tag_is_published() -> None:
    workflow = _workflow("release")
    may_publish = [job for job in workflow["jobs"].values() if "id-token" in job.get("permissions", {})]
    assert [job["if"] for job in may_publish] == ["github.event_name == 'push' && github.ref_type == 'tag'"]
    assert workflow["permissions"] == {"contents": "read"}


def test_the_image_installs_as_the_readme_says() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert text.startswith("# NOT BUILT"), "say so until it is"
    installed = re.findall(r"^RUN (pip .*)$", text, re.M)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert installed
    assert [line for line in installed if f"\n{line} " not in readme] == []
