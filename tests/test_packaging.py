"""What is installed is what is in the tree; the command's help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from odc_triton.tools.cli import command as cli

tomllib = pytest.importorskip("tomllib")  # Python 3.11 has it; the metadata are the same on 3.10
FLOOR = "constraints-2.13-floor.txt"
ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_installed() -> None:
    folders = {path.parent.relative_to(ROOT) for top in ("odc_triton", "bench") for path in (ROOT / top).rglob("*.py")}
    found = {".".join(folder.parts).replace("bench", "odc_bench", 1) for folder in folders} | {"odc_kernels"}
    only_here = {"odc_bench.suites.gpu"}  # runs the tests
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found - only_here


def test_commands_that_users_read_start_as_installed() -> None:
    """Benchmarks that need the tests, or are only in the repository, are `bench` there."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "odc_triton").rglob("*.py")]
    named = {each for page in pages for each in re.findall(r"-m ((?:odc_)?bench\.[\w.]+)", page.read_text())}
    assert {"odc_bench.suites.links", "bench.suites.gpu"} <= named
    for each in named:
        path = ROOT / "bench" / "/".join(each.split(".")[1:])
        file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        package = ".".join(("odc_bench", *file.relative_to(ROOT / "bench").parent.parts))
        here_only = re.search(r"^\s*from (tests|bench)\b", file.read_text(), re.M)
        installed = package in PROJECT["tool"]["setuptools"]["packages"] and not here_only
        assert installed or each.startswith("bench."), f"{each} is only in the repository, as bench"


def _pins(name: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if line and line[0] != "#")


def test_pins_lie_in_the_open_ranges() -> None:
    from packaging.requirements import Requirement

    extras = PROJECT["project"]["optional-dependencies"]
    required = [*PROJECT["project"]["dependencies"], *extras["trl"], *extras["docs"]]
    ranges = {r.name: r.specifier for r in map(Requirement, required)}
    for file in ("constraints.txt", FLOOR):
        pins = _pins(file)
        assert {"torch", "triton", "transformers"} <= pins.keys()
        for name, version in pins.items():
            assert version in ranges[name], name
    assert all("==" not in str(specifier) for specifier in ranges.values()), "a library pins nothing"
    for name in ("transformers", "accelerate"):
        assert str(ranges[name]) == f">={_pins(FLOOR)[name]}", "the oldest that is tested"


def test_trainers_refuse_what_their_extra_excludes() -> None:
    from packaging.requirements import Requirement

    from odc_triton.jobs.trainers import sharded_trainer
    from odc_triton.jobs.trainers.trl_metrics import MINORS

    assert _pins(FLOOR)["accelerate"] == sharded_trainer._ACCELERATE
    *_, trl = map(Requirement, PROJECT["project"]["optional-dependencies"]["trl"])
    for minor in range(30):
        assert (f"1.{minor}.0" in trl.specifier) == (f"1.{minor}" in MINORS)
    assert _pins(FLOOR)["trl"] == f"{MINORS[0]}.0", "the oldest that is tested"


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
