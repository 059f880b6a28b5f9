"""One checkpoint: a folder that all ranks write together, atomically, and that any number of ranks can read.

.metadata, __0_0.distcp, __1_0.distcp   model and optimizer, in the format of torch's DCP; with PEFT's adapters, only
                                        trained parameters, and a score that a base lacks
base.json                               with PEFT's adapters: the base's name and digest, see base_model.py
state.json                              training progress, from rank 0
random-0.json, random-1.json            the ranks' random number generators
manifest.json                           sizes and digests of all these, to detect damaged checkpoints
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..base.errors import CheckpointCorrupt
from ..base.files import put_in_place, read_json_object, sync_folder
from ..engine.api import engine_of
from . import base_model, dcp, training_state
from .dcp import DigestedFiles, Written
from .failures import all_or_none
from .random_state import random_state, restore_random_state, seed_random_state

MANIFEST, _STATE = "manifest.json", "state.json"
_OWN = "odc_"  # keys in the state: what participants of the minibatch save
_FORMAT = 1
_BLOCK_BYTES = 2**20
_REMEDY = "this checkpoint can't be used, continue from an older one"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`number`: of checkpoints saved before in the same folder; `step`: the optimizer's; `world`: number of ranks."""

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
        path = folder / MANIFEST
        if not path.is_file():
            raise CheckpointCorrupt(f"{path} is {'not a file' if path.exists() else 'missing'}: {_REMEDY}")
        data = path.read_bytes()
        try:
            content = json.loads(data)
            if content.pop("sha256") != _digest(content):
                raise ValueError("its digest is wrong")
            if content.pop("format") != _FORMAT:
                raise ValueError("this version can't read its format")
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
                raise CheckpointCorrupt(f"{folder / name} was changed after it was written: SHA-256 differs; {_REMEDY}")


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_checkpoint(
    final: Path,
    *,
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any],
    step: int,
    prepare: Callable[[], None] = lambda: None,
    number: Callable[[], int] = lambda: 0,
) -> None:
    """Writes model, optimizer, every rank's random state and rank 0's `state`, JSON-able, into `final`. Collective.

    The folder is written under a temporary name and renamed, and replaces an existing one. Rank 0 calls `prepare`
    first, and `number` after writing, for the manifest.

    Call it between minibatches. Raises CheckpointFailed on every rank, with the rank and the cause, if one could not
    write; then nothing is left behind. Raises RankLost and DeadlineExceeded as barriers do; then folders named by
    `unfinished` may be left.
    """
    engine = engine_of(model)
    purpose = f"save {Path(*final.parts[-2:])}"
    saving: Saving | None = None
    try:
        with all_or_none(engine, purpose):
            if engine.rank == 0:
                prepare()
        with all_or_none(engine, purpose) as shared:
            saving = Saving(final, model=model, optimizer=optimizer, state=state, step=step)
            shared["written"] = saving.write()
        with all_or_none(engine, purpose):
            if engine.rank == 0:
                saving.finish([theirs["written"] for theirs in shared.all], number=number())
    except BaseException:
        if saving is not None:
            saving.abandon()
        raise


class Saving:
    """This rank's side of a checkpoint: each rank writes into its own folder, and rank 0 merges them into `final`.

    Values are read by `hold`, or else by `write`. Raises RuntimeError inside a minibatch.
    """

    def __init__(
        self, final: Path, *, model: nn.Module, optimizer: Optimizer, state: dict[str, Any], step: int
    ) -> None:
        engine = engine_of(model)
        if engine.is_open:
            raise RuntimeError("saving inside a minibatch: gradients are not reduced; save after the optimizer's step")
        if reserved := [key for key in state if key.startswith(_OWN)]:
            raise ValueError(
                f"state has the key {reserved[0]!r}: keys that begin with {_OWN!r} are reserved, rename it"
            )
        engine.drain("saving a checkpoint")
        self.final, self.step = final, step
        self._engine = engine
        self._aside = unfinished(final, "saving")
        self._base_name = base_model.base_name(model)
        self._base = base_model.frozen_base(model) if self._base_name or engine.base else {}
        self._base_sum: int | None = None
        self._part = dcp.Part(engine.rank, training_state.to_save(model, optimizer, without=self._base))
        self._json = {f"random-{engine.rank}.json": json.dumps(random_state())}
        if engine.rank == 0:
            own = {each.saved_as: each.state() for each in engine.participants if each.saved_as is not None}
            self._json[_STATE] = json.dumps(state | own)

    def hold(self, memory: dict[str, torch.Tensor]) -> None:
        """Copies the saved values to the host: see `dcp.Part.hold`. The model may change afterwards."""
        self._part.hold(memory)
        if self._engine.heap.device.type == "cuda":  # else in `write`'s thread: frozen weights don't change
            self._sum_base()
        self._engine.drain("copying a checkpoint to the host")

    def write(self, is_dropped: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Writes this rank's files; returns a report for rank 0's `finish`, as JSON. Raises OSError; InterruptedError
        once `is_dropped()`.
        """
        self._aside.mkdir()
        files = self._part.write(self._aside, is_dropped)
        for name, text in self._json.items():
            files |= _write(self._aside / name, text.encode())
        sizes = {name: [f.size_bytes, f.sha256] for name, f in files.items()}
        return {"aside": self._aside.name, "files": sizes, "base": self._sum_base()}

    def _sum_base(self) -> int:
        if self._base_sum is None:
            self._base_sum = base_model.own_sum(self._base, self._engine.rank, self._engine.world)
        return self._base_sum

    def finish(self, written: list[dict[str, Any]], *, number: int) -> None:
        """Merges the ranks' folders, by the results of their `write`, and renames the folder to `final`. Rank 0 calls
        it, once all have written. Raises OSError.
        """
        aside, final, files = self._aside, self.final, {}
        for rank, theirs in enumerate(written):
            files |= {name: Written(size_bytes=size, sha256=digest) for name, (size, digest) in theirs["files"].items()}
            folder = final.with_name(theirs["aside"])
            if folder != aside:
                for name in (*theirs["files"], dcp.list_name(rank)):
                    os.rename(folder / name, aside / name)
                folder.rmdir()
        files |= dcp.join_parts(aside, self._part.contents, len(written))
        if self._base:
            named = base_model.described(
                self._base_name or "a base without a name", self._base, [theirs["base"] for theirs in written]
            )
            files |= _write(aside / base_model.FILE, json.dumps(named).encode())
        _write(aside / MANIFEST, Manifest(number=number, step=self.step, world=len(written), files=files).to_json())
        sync_folder(aside)
        # `final` exists if a run that resumed from an older checkpoint saves this step again.
        put_in_place(aside, final, former=unfinished(final, "replaced"))

    def abandon(self) -> None:
        """Removes this rank's files, unless they are finished."""
        shutil.rmtree(self._aside, ignore_errors=True)


def unfinished(final: Path, why: str) -> Path:
    """A temporary name for a future or former `final`."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.{why}")


def load_checkpoint(path: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Reads a checkpoint into `model` and `optimizer`, on any number of ranks, and returns its state. Collective.

    Each rank restores its own random state; ranks beyond those that saved the checkpoint are seeded from
    (the state's "seed", or 0; rank; step). A plain DCP folder, as from FSDP2's scripts, has no state, no random
    state and no digests: {} is returned. `optimizer`: None reads the model only.

    Raises, on every rank, CheckpointCorrupt for damaged files, CheckpointDiffers for those of another model, optimizer
    or adapters' base, CheckpointFailed. Nothing is overwritten then, unless values without digests are damaged.
    """
    engine, path = engine_of(model), Path(path)
    if engine.is_open:
        raise RuntimeError("loading inside a minibatch: peers are reading the parameters; load before it")
    purpose = f"load {Path(*path.parts[-2:])}"
    with all_or_none(engine, purpose) as shared, engine.barrier.working():  # some ranks may have large files to read
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a checkpoint: there is no such folder")
        saved = _manifest(path)
        if saved is not None:
            saved.check_sizes(path)
            saved.check_digests(path, engine.rank, engine.world)
        metadata = dcp.read_metadata(path)
        if saved is None:
            dcp.check_sizes(path, metadata)
        state = read_state(path)
        adapters_only = saved is not None and base_model.FILE in saved.files
        bases = base_model.frozen_bases(model) if adapters_only or engine.base else [{}]
        shared["base"] = [base_model.own_sum(each, engine.rank, engine.world) for each in bases]
    fresh = None if optimizer is None or optimizer.state else optimizer
    try:
        with all_or_none(engine, purpose):  # separate, because creating an optimizer's states is a step of all ranks
            base = bases[0]
            if adapters_only:
                base = base_model.require_same(path, bases, [theirs["base"] for theirs in shared.all])
            wanted = training_state.to_load(model, optimizer, metadata, without=base.keys())
            engine.drain("loading a checkpoint")
    except Exception:
        if fresh is not None:
            fresh.state.clear()
        raise
    with engine.publication.writing(), all_or_none(engine, purpose), engine.barrier.working():
        dcp.read_into(path, metadata, wanted)
        training_state.take(model, optimizer, wanted, metadata)
        if saved is not None:
            mine = path / f"random-{engine.rank}.json"
            if mine.name in saved.files:
                restore_random_state(json.loads(mine.read_bytes()))
            else:
                seed_random_state(int(state.get("seed", 0)), engine.rank, saved.step)
        own = {key: state.pop(key) for key in list(state) if key.startswith(_OWN)}
        for each in engine.participants:
            if each.saved_as in own:
                each.restore(own[each.saved_as])
    return state


def read_state(path: Path) -> dict[str, Any]:
    """The `state` given to `write_checkpoint`; {} for a plain DCP folder. Raises CheckpointCorrupt."""
    if _manifest(path) is None:
        return {}
    try:
        return read_json_object(path / _STATE, _REMEDY)
    except ValueError as error:
        raise CheckpointCorrupt(str(error)) from error


def verify(path: str | os.PathLike) -> None:
    """Reads all files of a checkpoint. Raises CheckpointCorrupt with the name of a damaged one."""
    path = Path(path)
    found = Manifest.read(path)
    found.check_sizes(path)
    found.check_digests(path)


def _manifest(path: Path) -> Manifest | None:
    """None for a checkpoint that `write_checkpoint` did not write."""
    if not (path / MANIFEST).exists() and not (path / _STATE).exists():
        return None
    return Manifest.read(path)


def _write(path: Path, data: bytes) -> dict[str, Written]:
    files = DigestedFiles()
    with files.create_stream(path, "wb") as file:
        file.write(data)
    return files.written
