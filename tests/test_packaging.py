"""What is installed is what is in the tree; the command's help."""

from __future__ import annotations

from pathlib import Path

import pytest

from odc_triton.tools.cli import command as cli

tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it; the metadata are the same on 3.10
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed() -> None:
    folders = {path.parent.relative_to(ROOT) for top in ("odc_triton", "bench") for path in (ROOT / top).rglob("*.py")}
    found = {".".join(folder.parts).replace("bench", "odc_bench", 1) for folder in folders} | {"odc_kernels"}
    only_here = {"odc_bench.suites.gpu"}  # runs the tests
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found - only_here


def test_pins_lie_in_the_open_ranges() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"
    )
    extras = PROJECT["project"]["optional-dependencies"]
    required = [*PROJECT["project"]["dependencies"], *extras["trainer"], *extras["docs"]]
    ranges = {r.name: r.specifier for r in map(Requirement, required)}
    assert {"torch", "triton", "transformers"} <= pins.keys()
    for name, version in pins.items():
        assert version in ranges[name], name
    assert all("==" not in str(specifier) for specifier in ranges.values()), "a library pins nothing"


def test_help_explains_every_option(capsys, monkeypatch) -> None:
    from dataclasses import fields

    from odc_triton.jobs.train.sft_options import SftOptions

    monkeypatch.setenv("COLUMNS", "1000")  # lines are wrapped at hyphens too
    with pytest.raises(SystemExit, match="0"):
        cli.main(["train", "sft", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for entry in fields(SftOptions):
        assert f"--{entry.name.replace('_', '-')}" in text
        assert " ".join(entry.metadata["help"].split()) in text
