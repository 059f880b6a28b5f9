"""Where models and tokenizers come from: a path, or a name on a hub."""

from __future__ import annotations

from pathlib import Path


def require_source(source: str) -> None:
    """Raises FileNotFoundError for what can only be a path, and is not there; what may be a hub's name passes."""
    path = Path(source)
    is_path = path.is_absolute() or source.startswith(".") or len(path.parts) > 2 or path.suffix == ".json"
    if not path.exists() and (is_path or (len(path.parts) == 2 and path.parent.is_dir())):
        raise FileNotFoundError(f"{source}: there is no such file or folder")
