"""A run's checkpoints: written under temporary names and renamed, the last few kept, each with its files' digests.

    folder/step-00000010/   contents: see checkpoint/folder.py

Unfinished folders, one per rank while it writes, are called `.step-….saving`, `.step-….removing` or
`.step-….replaced`. The process that holds the lock on `folder/.lock` (rank 0, for as long as it lives) owns these and
may remove those that exist at its start: they are leftovers of a killed run.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ...base.errors import CheckpointCorrupt
from ...base.files import remove_folder
from ...checkpoint.folder import Manifest, load_checkpoint, unfinished, verify, write_checkpoint
from ...comm.memory.heap import ByteLocks
from ...engine.api import engine_of

_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(step-\d{8,})\.[0-9a-f]+\.(saving|removing|replaced)")
_LOCK_WAIT_S = 10.0  # a killed job's rank 0 may take a moment to end


class Checkpoints:
    """The checkpoints in `folder`; the last `keep` are kept. Rank 0 creates the folder if there is none.

    Any rank may call `all` and `newest`; `save` and `load` are collective. Both use the model's own barriers, so a rank
    that died is named within seconds, and a late one after the timeout of `fully_shard`.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int, rank: int | None = None) -> None:
        """`rank`: of the model's, by default the process group's. The first one makes the folder."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.folder, self.keep = Path(folder), keep
        self.best: Path | None = None  # never removed
        self._lock: ByteLocks | None = None
        self._left: list[Path] = []  # leftovers of killed runs, until they are removed
        if rank is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
        if rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another user's folder, only read
                self._left = sorted(path for path in self.folder.iterdir() if _UNFINISHED.fullmatch(path.name))
                self._own(wait_s=0)

    def all(self) -> list[Path]:
        """All finished ones, in the order of saving. Raises CheckpointCorrupt for a damaged manifest."""
        return _by_age(self.folder)

    def newest(self, *, fallback: bool = False) -> Path | None:
        """The last one saved; None if there is none.

        Raises CheckpointCorrupt if files are missing or have another size; `load` checks their contents. `fallback`
        skips damaged ones, with a warning for each, and reads all files of those that it checks.
        """
        if not fallback:
            return newest_in(self.folder)
        folders = _folders(self.folder)  # damaged manifests first: they have no number
        for path in sorted(folders, key=lambda path: _number(path, damaged=sys.maxsize), reverse=True):
            try:
                verify(path)
                return path
            except CheckpointCorrupt as error:
                warnings.warn(f"skipped: {error}", stacklevel=2)
        return None

    @property
    def any_folder(self) -> bool:
        """True if there is a checkpoint, whole or not."""
        return bool(_folders(self.folder))

    def save(
        self, *, model: nn.Module, optimizer: Optimizer, state: dict[str, Any], step: int, prune: bool = True
    ) -> Path:
        """Saves model, optimizer, every rank's random state and rank 0's `state`, JSON-able. Collective.

        prune: removes the oldest ones beyond `keep`.

        Call it between minibatches. Returns the new folder. Raises CheckpointFailed on every rank, with the rank and
        the cause, if one could not write; then nothing is left behind, and older ones are unchanged. Raises RankLost
        and DeadlineExceeded as barriers do; then the next run removes the leftovers.
        """
        final = self.path_of(step)
        how = {"state": state, "step": step, "prepare": self.prepare, "number": self.next_number}
        write_checkpoint(final, model=model, optimizer=optimizer, **how)
        if engine_of(model).rank == 0 and prune:
            self.prune(final)
        return final

    def path_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def prepare(self) -> None:
        """Rank 0's part before it writes. Raises OSError for a folder that was removed or is another run's."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"the checkpoints' folder {self.folder} has vanished")
        self._own(wait_s=_LOCK_WAIT_S)

    def next_number(self) -> int:
        """The number of checkpoints saved here before the next one."""
        return 1 + max((_number(path, damaged=-1) for path in _folders(self.folder)), default=-1)

    def prune(self, newest: Path) -> None:
        """Removes the oldest ones beyond `keep`, and never `newest` and `best`. Only rank 0 calls it."""
        others = [path for path in _folders(self.folder) if path != newest]
        others.sort(key=lambda path: _number(path, damaged=-1))
        for path in others[: max(0, len(others) - self.keep + 1)]:
            if path == self.best:
                continue
            going = unfinished(path, "removing")
            with contextlib.suppress(OSError):  # the next save tries again
                os.rename(path, going)
            remove_folder(going)

    def _own(self, wait_s: float) -> None:
        """Takes the folder's lock, and removes leftovers of killed runs. Raises OSError."""
        if self._lock is None:
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._lock = ByteLocks(descriptor)
            weakref.finalize(self, os.close, descriptor)
        deadline_s = time.monotonic() + wait_s
        while not self._lock.try_lock(0):
            if time.monotonic() >= deadline_s:
                holder = self._lock.holder_pid(0)
                raise BlockingIOError(f"process {holder} saves checkpoints in {self.folder}: give another folder")
            time.sleep(0.1)
        # Take the lock each time: another object of this process may have closed the file, which drops it. See
        # [Note: traps of fcntl locks].
        while self._left:
            path = self._left.pop(0)
            found = _UNFINISHED.fullmatch(path.name)
            original = self.folder / found[1]
            if found[2] == "replaced" and not original.exists():
                os.rename(path, original)
            else:
                remove_folder(path)

    def load(self, path: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        """See `load_checkpoint`. Collective."""
        return load_checkpoint(path, model=model, optimizer=optimizer)


def newest_in(folder: Path) -> Path | None:
    """As `Checkpoints.newest`, without taking the folder's lock: a run may remove old ones meanwhile."""
    folders = _folders(folder)
    while True:
        try:
            found = _by_age(folder)
            if found:
                Manifest.read(found[-1]).check_sizes(found[-1])
            return found[-1] if found else None
        except (OSError, CheckpointCorrupt):
            before, folders = folders, _folders(folder)
            if folders == before:
                raise


def _by_age(folder: Path) -> list[Path]:
    return [path for _, path in sorted((_number(path), path) for path in _folders(folder))]


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def _number(path: Path, damaged: int | None = None) -> int:
    try:
        return Manifest.read(path).number
    except CheckpointCorrupt:
        if damaged is None:
            raise
        return damaged
