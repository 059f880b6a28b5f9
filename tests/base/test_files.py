"""Files are written whole or not at all; what can only be a path must be there, what may be a hub's name passes."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from odc_triton.base.files import fingerprint, folder_aside, reading, require_source, write_file


def test_paths_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "config.json").touch()
    for there in ("out", "config.json", str(tmp_path), "./out"):
        require_source(there)
    for missing in ("/no/where", "./model", "../model", "a/b/c", "tokenizer.json", "out/model"):
        with pytest.raises(FileNotFoundError, match=f"^{missing}: there is no such file or folder$"):
            require_source(missing)
    for of_a_hub in ("gpt2", "Qwen/Qwen2.5-1.5B"):
        require_source(of_a_hub)


def test_a_name_that_no_hub_has_says_what_it_was_taken_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with (
        pytest.raises(OSError, match=r"^model is not a local file or folder, so it was taken for a hub id.*: no!"),
        reading("model"),
    ):
        raise OSError("no!")
    (tmp_path / "model").mkdir()
    with pytest.raises(OSError, match=r"^no!$"), reading("model"):
        raise OSError("no!")


DAMAGED = {
    "git-lfs's pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "no length": b"\xff" * 20,
    "a list": (2).to_bytes(8, "little") + b"[]",
    "nested": (99_999).to_bytes(8, "little") + b"[" * 99_999,
    "empty": b"",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights_are_left_to_who_reads_them(tmp_path: Path, content: bytes) -> None:
    without = fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint(tmp_path) == without


def test_write_file_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, b"newer")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["f"]


def test_write_file_names_what_is_wrong(tmp_path: Path) -> None:
    write_file(tmp_path / "new" / "f", b"1")
    assert (tmp_path / "new" / "f").read_bytes() == b"1"
    for path, kind in ((tmp_path / "new", IsADirectoryError), (tmp_path / "new" / "f" / "g", OSError)):
        with pytest.raises(kind, match=f"can't write {path}: "):
            write_file(path, b"")


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_is_written_where_a_link_leads(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "real").mkdir()
    for name, target in (("to a folder", "real"), ("to nothing", "disk/new")):
        (tmp_path / name).symlink_to(target)
        with folder_aside(tmp_path / name, overwrite=overwrite) as aside:
            assert aside.parent == (tmp_path / target).parent  # on the same disk
            (aside / "file").touch()
        assert os.readlink(tmp_path / name) == target
        assert _names(tmp_path / target) == ["file"]
    assert _names(tmp_path) == ["disk", "real", "to a folder", "to nothing"]


@pytest.mark.parametrize("can_link", [True, False])
def test_what_is_not_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_link: bool) -> None:
    """Where a link leads too: of an old folder goes what the new one has, and what is said to be replaced."""
    real, path = tmp_path / "disk", tmp_path / "out"
    (real / "runs" / "one").mkdir(parents=True)
    path.symlink_to(real)
    for name in ("notes.txt", "config.json", "old.weights", "runs/one/log"):
        (real / name).write_text("mine")
    (real / "latest").symlink_to("runs/one")
    real.chmod(0o2770)
    if not can_link:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=PermissionError("no links on this disk")))
    with folder_aside(path, overwrite=True, replaces=lambda name: name.endswith(".weights")) as aside:
        (aside / "config.json").write_text("new")
    assert _names(tmp_path) == ["disk", "out"]
    assert _names(path) == ["config.json", "latest", "notes.txt", "runs"]
    assert (os.readlink(path), os.readlink(real / "latest")) == (str(real), "runs/one")
    assert (real / "config.json").read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o2770
    assert (real / "latest" / "log").read_text() == (real / "notes.txt").read_text() == "mine"


def _write(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "file").touch()


@pytest.mark.parametrize("appears", [_write, Path.touch])
def test_what_appears_meanwhile_stays(tmp_path: Path, appears: Callable[[Path], None]) -> None:
    path = tmp_path / "out"
    writing = folder_aside(path)
    _write(writing.__enter__() / "ours")
    appears(path)
    with pytest.raises(FileExistsError, match=f"{path} was created by another process meanwhile, and stays"):
        writing.__exit__(None, None, None)
    assert path.is_file() or _names(path) == ["file"]
    assert _names(tmp_path) == ["out"]


def test_what_a_killed_process_left_is_removed_and_what_it_moved_away_put_back(tmp_path: Path) -> None:
    path, other = tmp_path / "out", ".out2.77.00000001.new"
    for name in (".out.77.00000001.new", ".out.77.00000001.old", ".out.78.00000002.new", other):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.77.00000001.old" / "former").touch()
    lives = os.open(tmp_path / ".out.78.00000002.new", os.O_RDONLY)
    fcntl.flock(lives, fcntl.LOCK_EX)
    with pytest.raises(FileExistsError, match="is not empty"), folder_aside(path):
        pass
    assert _names(path) == ["former"]
    assert _names(tmp_path) == [".out.78.00000002.new", other, "out"]
    os.close(lives)
    with folder_aside(path, overwrite=True) as aside:
        (aside / "new").touch()
        assert _names(tmp_path) == sorted([aside.name, other, "out"])
    assert _names(path) == ["new"]
    assert _names(tmp_path) == [other, "out"]
