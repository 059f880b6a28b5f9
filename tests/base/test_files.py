"""What can only be a path must be there; what may be a hub's name is let through."""

from __future__ import annotations

from pathlib import Path

import pytest

from odc_triton.base.files import reading, require_source


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
