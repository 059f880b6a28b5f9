"""A run's checkpoints: written aside and renamed, the last few kept, each with its files' digests.

    folder/step-00000010/  .metadata, __0_0.distcp, __1_0.distcp   model and optimizer, as torch's DCP has them
                           state.json                              where the run stands, rank 0's
                           random-0.json, random-1.json            the ranks' random numbers
                           manifest.json                           all of these, with their sizes and digests

What is not finished is called `.step-….saving`, `.step-….removing` or `.step-….replaced`. Who holds the lock of
`folder/.lock`, as rank 0 does for as long as it lives, owns these: it may take away what a killed run has left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from odc_triton.api import engine_of, publish
from odc_triton.checkpoint import dcp, manifest, training_state
from odc_triton.checkpoint.aside import sync_folder
from odc_triton.checkpoint.dcp import DigestedFiles, Written
from odc_triton.checkpoint.manifest import Manifest
from odc_triton.checkpoint.together import together
from odc_triton.errors import CheckpointCorrupt
from odc_triton.memory.locks import ByteLocks
from odc_triton.train.rng import random_state, restore_random_state, seed_random_state

_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.(step-\d{8,})\.[0-9a-f]+\.(saving|removing|replaced)")
_STATE = "state.json"
_LOCK_WAIT_S = 10.0  # a killed job's rank 0 may take a moment to go


class Checkpoints:
    """The checkpoints in `folder`, of which the last `keep` stay. Rank 0 makes the folder if it is not there.

    Any rank may look; `save` and `load` are collective. Both meet through the model's own meetings, so a rank that
    died is named within seconds, one that is late when the deadline of `fully_shard` is over.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay")
        self.folder, self.keep = Path(folder), keep
        self._lock: ByteLocks | None = None
        self._is_clean = False
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # somebody else's folder, to read from
                self._own(wait_s=0)

    # ------------------------------------------------------------------ looking

    def all(self) -> list[Path]:
        """All finished ones, the last saved last. Raises CheckpointCorrupt for one whose manifest is damaged."""
        return _by_age(self.folder)

    def newest(self, *, fallback: bool = False) -> Path | None:
        """The last one saved; None where there is none.

        Raises CheckpointCorrupt if its files are missing or of another size; what they contain is checked by `load`.
        `fallback`: passes over damaged ones, with a warning for each; reads all files of those that it looks at.
        """
        if not fallback:
            return newest_in(self.folder)
        sound = []
        for path in _folders(self.folder):
            try:
                sound.append((_number(path), path))
            except CheckpointCorrupt as error:
                warnings.warn(f"passed over: {error}", stacklevel=2)
        for _, path in sorted(sound, reverse=True):
            try:
                verify(path)
                return path
            except CheckpointCorrupt as error:
                warnings.warn(f"passed over: {error}", stacklevel=2)
        return None

    # ------------------------------------------------------------------ saving

    def save(
        self, *, model: nn.Module, optimizer: Optimizer, state: dict[str, Any], step: int, prune: bool = True
    ) -> Path:
        """Saves model, optimizer, every rank's random numbers and rank 0's `state`, JSON-able. Collective.

        prune: removes those that are more than `keep`.

        Call it between minibatches. Returns the new folder. Raises CheckpointFailed on every rank, with the rank and
        the cause, when one could not write: nothing is left of it and the older ones are as they were. RankLost and
        DeadlineExceeded as meetings do; what is left then is taken away by the next run.
        """
        engine = engine_of(model)
        if engine.phase.name == "OPEN":
            raise RuntimeError("save inside a minibatch: gradients have not landed; save after the optimizer's step")
        name = f"step-{step:08d}"
        purpose = f"save {name}"
        aside: Path | None = None
        try:
            with together(engine, purpose) as shared:
                if engine.rank == 0:
                    if not self.folder.is_dir():
                        raise FileNotFoundError(f"the checkpoints' folder {self.folder} has vanished")
                    self._own(wait_s=_LOCK_WAIT_S)
                    aside = self._unfinished(name, "saving")
                    aside.mkdir()
                    shared["aside"] = aside.name
                engine.drain("saving a checkpoint")
            part = self.folder / shared.all[0]["aside"]
            with together(engine, purpose) as shared:
                files = dcp.write_part(part, engine.rank, training_state.to_save(model, optimizer))
                files |= _write_json(part / f"random-{engine.rank}.json", random_state())
                if engine.rank == 0:
                    files |= _write_json(part / _STATE, state)
                shared["files"] = {file: [entry.size_bytes, entry.sha256] for file, entry in files.items()}
            final = self.folder / name
            written = [theirs["files"] for theirs in shared.all]
            with together(engine, purpose):
                if engine.rank == 0:
                    self._finish(part, final, step=step, written=written)
        except BaseException:
            if aside is not None:
                shutil.rmtree(aside, ignore_errors=True)
            raise
        if engine.rank == 0 and prune:
            self._prune(final)
        return final

    def _finish(self, aside: Path, final: Path, *, step: int, written: list[dict[str, list[Any]]]) -> None:
        files = dcp.join_parts(aside, len(written))
        for theirs in written:
            files |= {name: Written(size_bytes=size, sha256=digest) for name, (size, digest) in theirs.items()}
        number = 1 + max((_number(path, damaged=-1) for path in _folders(self.folder)), default=-1)
        content = Manifest(number=number, step=step, world=len(written), files=files).to_json()
        with DigestedFiles().create_stream(aside / manifest.NAME, "wb") as file:
            file.write(content)
        sync_folder(aside)
        replaced = None
        if final.exists():  # this step was saved before, by a run that went on from an older one
            replaced = self._unfinished(final.name, "replaced")
            os.rename(final, replaced)
        try:
            os.rename(aside, final)
        except OSError:
            if replaced is not None:
                os.rename(replaced, final)
            raise
        sync_folder(self.folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)

    def _prune(self, newest: Path) -> None:
        others = [path for path in _folders(self.folder) if path != newest]
        others.sort(key=lambda path: _number(path, damaged=-1))
        for path in others[: max(0, len(others) - self.keep + 1)]:
            going = self._unfinished(path.name, "removing")
            with contextlib.suppress(OSError):  # it stays, and the next saving tries again
                os.rename(path, going)
            shutil.rmtree(going, ignore_errors=True)

    def _unfinished(self, name: str, why: str) -> Path:
        return self.folder / f".{name}.{secrets.token_hex(4)}.{why}"

    # ------------------------------------------------------------------ who owns the folder

    def _own(self, wait_s: float) -> None:
        """Takes the folder's lock, and takes away what killed runs have left. Raises OSError."""
        if self._lock is None:
            descriptor = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._lock = ByteLocks(descriptor)
            weakref.finalize(self, os.close, descriptor)
        deadline_s = time.monotonic() + wait_s
        while not self._lock.try_lock(0):
            if time.monotonic() >= deadline_s:
                holder = self._lock.holder_pid(0)
                raise BlockingIOError(f"process {holder} saves its checkpoints in {self.folder}: give another folder")
            time.sleep(0.1)
        # Asked for each time, as another object of this process may have closed the file, which drops the lock too: see
        # [Note: traps of fcntl locks].
        if self._is_clean:
            return
        self._is_clean = True
        for path in sorted(self.folder.iterdir()):
            if (found := _UNFINISHED.fullmatch(path.name)) is None:
                continue
            original = self.folder / found[1]
            if found[2] == "replaced" and not original.exists():
                os.rename(path, original)
            else:
                shutil.rmtree(path, ignore_errors=True)

    # ------------------------------------------------------------------ loading

    def load(self, path: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
        """Reads a checkpoint into `model` and `optimizer`, on any number of ranks, and returns its state. Collective.

        Each rank goes on with its own random numbers; one that the checkpoint has none of, on more ranks than saved
        it, is seeded from (the state's "seed", or 0; rank; step). A folder that is only DCP's, as FSDP2's scripts
        write, has no state, no random numbers and no digests: {} is returned. `optimizer`: None reads the model only.

        Before anything is overwritten: CheckpointCorrupt for damaged files, CheckpointDiffers for another model's or
        optimizer's, CheckpointFailed, all on every rank.
        """
        return load_checkpoint(path, model=model, optimizer=optimizer)


def load_checkpoint(path: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """`Checkpoints.load`, wherever the checkpoint lies. Collective."""
    engine, path = engine_of(model), Path(path)
    if engine.phase.name == "OPEN":
        raise RuntimeError("load inside a minibatch: peers are reading the parameters")
    purpose = f"load {path.name}"
    with together(engine, purpose):
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is no checkpoint: there is no such folder")
        saved = _manifest(path)
        if saved is not None:
            saved.check_sizes(path)
            saved.check_digests(path, engine.rank, engine.world)
        metadata = dcp.read_metadata(path)
        state = json.loads((path / _STATE).read_bytes()) if saved else {}
    with together(engine, purpose):  # of its own, as making an optimizer's states is a step of all ranks
        wanted = training_state.to_load(model, optimizer, metadata)
        engine.drain("loading a checkpoint")
    with together(engine, purpose):
        dcp.read_into(path, metadata, wanted)
        training_state.take(model, optimizer, wanted, metadata)
        if saved is not None:
            mine = path / f"random-{engine.rank}.json"
            if mine.name in saved.files:
                restore_random_state(json.loads(mine.read_bytes()))
            else:
                seed_random_state(int(state.get("seed", 0)), engine.rank, saved.step)
    publish(model)
    return state


def newest_in(folder: Path) -> Path | None:
    """As `Checkpoints.newest`, for who only looks."""
    found = _by_age(folder)
    if found:
        Manifest.read(found[-1]).check_sizes(found[-1])
    return found[-1] if found else None


def _by_age(folder: Path) -> list[Path]:
    return [path for _, path in sorted((_number(path), path) for path in _folders(folder))]


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def verify(path: str | os.PathLike) -> None:
    """Reads all files of a checkpoint. Raises CheckpointCorrupt with the name of one that is damaged."""
    path = Path(path)
    found = Manifest.read(path)
    found.check_sizes(path)
    found.check_digests(path)


def _manifest(path: Path) -> Manifest | None:
    """None for a checkpoint that `Checkpoints` did not write."""
    if not (path / manifest.NAME).exists() and not (path / _STATE).exists():
        return None
    return Manifest.read(path)


def _number(path: Path, damaged: int | None = None) -> int:
    try:
        return Manifest.read(path).number
    except CheckpointCorrupt:
        if damaged is None:
            raise
        return damaged


def _write_json(path: Path, content: Any) -> dict[str, Written]:
    files = DigestedFiles()
    with files.create_stream(path, "wb") as file:
        file.write(json.dumps(content).encode())
    return files.written
