"""Where models and tokenizers come from: a path, or a name on a hub."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


def require_source(source: str) -> None:
    """Raises FileNotFoundError for what can only be a path, and is not there; what may be a hub's name passes."""
    path = Path(source)
    is_path = path.is_absolute() or source.startswith(".") or len(path.parts) > 2 or path.suffix == ".json"
    if not path.exists() and (is_path or (len(path.parts) == 2 and path.parent.is_dir())):
        raise FileNotFoundError(f"{source}: there is no such file or folder")


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """Around what transformers reads of `source`: an error says what `source` was taken for, and what helps here.

    Raises OSError, as `require_source` too, and ValueError.
    """
    require_source(source)
    try:
        yield
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):  # which no command here takes
            raise ValueError(
                f"{source} brings code of its own (auto_map in its configuration), and odc-triton runs no code from a "
                "model's folder: give a model that transformers knows by itself"
            ) from error
        if Path(source).exists():
            raise
        reason = " ".join(str(error).split())[:300]
        raise OSError(
            f"{source} is no file or folder here, so it was taken for a name on the hub, and can't be read: {reason}"
        ) from error
