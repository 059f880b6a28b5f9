"""Options from a YAML file: the types and names of the command line, and every mistake named with its place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from odc_triton.jobs.options.config_file import read_config, with_config, write_config
from odc_triton.jobs.options.options import REQUIRED, option, read_options


@dataclass(frozen=True, kw_only=True)
class Options:
    """A job."""

    data: tuple[str, ...] = option(REQUIRED, "files")
    out: str | None = option(None, "folder")
    token_cap: int | None = option(None, "tokens")
    lr: float = option(0.1, "rate")
    exact: bool = option(False, "exact")
    balance: Literal["mini", "queue"] = option("mini", "dealing")
    share: Literal["auto", "off", "no", "null", "3"] | None = option(None, "words that YAML takes for values")
    weight: tuple[float, ...] = option((), "weights")
    offload: bool = option(False, "offload", once="offload_old")
    alternatives: ClassVar[tuple[frozenset[str], ...]] = (frozenset(("token_cap", "balance")),)


def read(folder: Path, text: str) -> dict:
    (folder / "run.yaml").write_text(text)
    return read_config(folder / "run.yaml", Options, ranks=int)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    wanted = Options(data=("a: b.jsonl", "no", "ü"), token_cap=7, lr=1e-5, exact=True, balance="queue", weight=(2, 0.5))
    write_config(tmp_path / "run.yaml", wanted, comment="a comment", ranks=3)
    text = (tmp_path / "run.yaml").read_text()
    assert text.startswith("# a comment\nranks: 3\ndata:\n- 'a: b.jsonl'\n")
    assert "\ntoken-cap: 7\n" in text
    assert "out" not in text, "None is left out"
    found = read_config(tmp_path / "run.yaml", Options, ranks=int)
    assert found.pop("ranks") == 3
    assert read_options(Options, found) == wanted
    write_config(tmp_path / "run.yaml", Options(data=("a",), lr=0.0), comment="the default is another number")
    assert read_config(tmp_path / "run.yaml", Options)["lr"] == 0.0


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("data: a\nlr: 1e-5", {"data": ["a"], "lr": 1e-5}),  # YAML takes it for text
        ("data: [a, b]\nlr: 2", {"data": ["a", "b"], "lr": 2.0}),
        ("token-cap: 5\nout: null", {"token_cap": 5}),
        ("# nothing else\nweight: 2", {"weight": [2.0]}),
        *(
            (f"share: {text}", {"share": word})
            for text, word in {"off": "off", "OFF": "off", "no": "no", "3": "3"}.items()
        ),
        ("share: null\nexact: off", {"share": "null", "exact": False}),
        ("share: 'off'", {"share": "off"}),
        ("offload-old: true", {"offload": True}),
        ("offload_old: true", {"offload": True}),
    ],
)
def test_forms_of_values(tmp_path: Path, text: str, wanted: dict) -> None:
    assert read(tmp_path, text) == wanted


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token-capp: 5", "there is no option token-capp; did you mean token-cap?"),
        ("zzzzz: 5", r"there is no option zzzzz; --help lists the names\Z"),
        ("learning_rate: 1", r"there is no option learning_rate; learning_rate is lr here\Z"),
        ("max-length: 1", r"there is no option max-length; max-length is token-cap here, of a pack; see --truncate\Z"),
        ("optimm: 1\nfloat: 2", r"there is no option optimm.*\. There is no option float;"),
        ("<<: {balance: off}", "balance is False; choose one of mini, queue"),
        ("token-cap: 5\ntoken_cap: 6", "token-cap appears twice"),
        ("lr: 1\nlr: 2", "lr appears twice"),
        ("offload-old: true\noffload: false", "offload appears twice"),
        ("token-cap: 5.5", "token-cap is 5.5; give a whole number"),
        ("lr: fast", "lr is 'fast'; give a number"),
        (f"lr: 1{'0' * 400}", "lr is 10*; give a number"),
        ("lr: [1]", r"lr is \[1\]; give a number"),
        ("exact: 1", "exact is 1; give true or false"),
        ("out: 7", "out is 7; give text, in quotes"),
        ("data: [a, 7]", "data is 7; give text, in quotes"),
        ("balance: none", "balance is 'none'; choose one of mini, queue"),
        ("share: on", "share is 'on'; choose one of auto, off, no, null, 3"),
        ("share: 'OFF'", "share is 'OFF'; choose one of auto, off, no, null, 3"),
        ("balance: [off]", r"balance is \[False\]; choose one of mini, queue"),
        ("", "has no options: give lines such as"),
        ("a: [", "is not valid YAML: while parsing"),
        ("data: 2026-13-01", "is not valid YAML: month must be in 1..12"),
        ("a: " + "[" * 1000, "is not valid YAML: maximum recursion depth exceeded"),
        ("data: !!python/object:os.system a", "is not valid YAML: could not determine a constructor"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        read(tmp_path, text)
    assert str(refused.value).startswith(str(tmp_path / "run.yaml"))


def test_files_that_cant_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"out: \xe4")
    for name, said in (("nowhere", "No such file"), ("", "Is a directory"), ("latin", "is not valid YAML")):
        with pytest.raises(ValueError, match=re.escape(said)):
            read_config(tmp_path / name, Options)


def test_arguments_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: [a, b]\nlr: 1\nranks: 2\n")
    found = with_config(Options, {"config": str(path), "lr": 3.0})
    assert (found["data"], found["lr"], found["ranks"]) == (["a", "b"], 3.0, 2)
    assert with_config(Options, {"lr": 3.0}) == {"lr": 3.0}
    path.write_text("data: a\ntoken_cap: 7\n")
    found = with_config(Options, {"config": str(path), "balance": "queue"})
    assert "token_cap" not in found, "an argument takes the place of what it contradicts"
    with pytest.raises(ValueError, match="--data is missing"):
        read_options(Options, {"lr": 3.0})
