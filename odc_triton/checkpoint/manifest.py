"""The list of a folder's files with their digests, and its own: what tells a whole checkpoint from a damaged one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..base.errors import CheckpointCorrupt
from .dcp import Written

NAME = "manifest.json"
_FORMAT = 1
_BLOCK_BYTES = 2**20
_REMEDY = "this checkpoint can't be used, go on from an older one"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`number`: how many were saved into the same place before this one; `step`: of the optimizer; `world`: ranks."""

    number: int
    step: int
    world: int
    files: dict[str, Written]

    def to_json(self) -> bytes:
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps(content | {"sha256": _digest(content)}, indent=1).encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointCorrupt."""
        path = folder / NAME
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is {'no file' if path.exists() else 'missing'}: {_REMEDY}")
        data = path.read_bytes()
        try:
            content = json.loads(data)
            if content.pop("sha256") != _digest(content):
                raise ValueError("its own digest is another")
            if content.pop("format") != _FORMAT:
                raise ValueError("it has a format that this version does not know")
            files = {name: Written(**entry) for name, entry in content.pop("files").items()}
            return cls(files=files, **content)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path} is damaged ({error}): {_REMEDY}") from error

    def check_sizes(self, folder: Path) -> None:
        """Raises CheckpointCorrupt for a file that is missing or of another size."""
        for name, file in self.files.items():
            path = folder / name
            size_bytes = path.stat().st_size if path.is_file() else None
            if size_bytes != file.size_bytes:
                now = "is missing" if size_bytes is None else f"has {size_bytes} bytes"
                raise CheckpointCorrupt(f"{path} {now} and was written with {file.size_bytes}: {_REMEDY}")

    def check_digests(self, folder: Path, part: int = 0, parts: int = 1) -> None:
        """Raises CheckpointCorrupt for a file whose content changed; reads every `parts`-th file, from `part` on."""
        for name in sorted(self.files)[part::parts]:
            digest = hashlib.sha256()
            with open(folder / name, "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
            if digest.hexdigest() != self.files[name].sha256:
                raise CheckpointCorrupt(f"{folder / name} is not what was written: its SHA-256 is another; {_REMEDY}")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
