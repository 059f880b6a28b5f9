"""Files are written whole or not at all; what can only be a path must be there, what may be a hub's name passes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from odc_triton.base.files import reading, require_source, write_file


def test_paths_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "config.json").touch()
    for there in ("out", "config.json", str(tmp_path), "./out"):
        require_source(there)
    for missing in ("/no/where", "./model", "../model", "a/b/c", "tokenizer.json", "out/model"):
        with pytest.raises(FileNotFoundError, match=f"^{missing}: there is no such file or folder$"):
            require_source(missing)


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-1.5B"])
def test_names_of_a_hub_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_source(name)
    assert not (tmp_path / name).exists()


def test_a_name_that_no_hub_has_says_what_it_was_taken_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(OSError, match=r"^model is not a local file or folder, so it was taken for a hub id.*: no!"),
        reading("model"),
    ):
        raise OSError("no!")
    (tmp_path / "model").mkdir()
    with pytest.raises(OSError, match=r"^no!$"), reading("model"):
        raise OSError("no!")


def test_write_file_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_write_file_names_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing; create it"):
        write_file(tmp_path / "missing" / "f", b"")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        write_file(tmp_path / "file" / "f", b"")
    with pytest.raises(IsADirectoryError, match="add a file name"):
        write_file(tmp_path, b"")

    # Tests may run as root, whom no mode bits stop.
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError, match=r"no permission .*choose another folder"):
        write_file(tmp_path / "f", b"")
