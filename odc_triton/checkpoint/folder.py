"""One checkpoint: a folder that all ranks write together, whole or not at all, and that any number of ranks reads.

.metadata, __0_0.distcp, __1_0.distcp   model and optimizer, as torch's DCP has them
state.json                              where the training stands, rank 0's
random-0.json, random-1.json            the ranks' random numbers
manifest.json                           all of these, with their sizes and digests
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..base.aside import sync_folder
from ..engine.api import engine_of, publish
from . import dcp, manifest, training_state
from .dcp import DigestedFiles, Written
from .manifest import Manifest
from .random_state import random_state, restore_random_state, seed_random_state
from .together import together

_STATE = "state.json"


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
    """Writes model, optimizer, every rank's random numbers and rank 0's `state`, JSON-able, into `final`. Collective.

    It is written aside and renamed, in the place of what is there already. `prepare` is called on rank 0 before, and
    `number` after all is written, for the manifest.

    Call it between minibatches. Raises CheckpointFailed on every rank, with the rank and the cause, when one could not
    write: nothing is left of it then. RankLost and DeadlineExceeded as meetings do: `unfinished` says what is left.
    """
    engine = engine_of(model)
    if engine.phase.name == "OPEN":
        raise RuntimeError("save inside a minibatch: gradients have not landed; save after the optimizer's step")
    purpose = f"save {Path(*final.parts[-2:])}"
    aside: Path | None = None
    try:
        with together(engine, purpose) as shared:
            if engine.rank == 0:
                prepare()
                aside = unfinished(final, "saving")
                aside.mkdir()
                shared["aside"] = aside.name
            engine.drain("saving a checkpoint")
        part = final.with_name(shared.all[0]["aside"])
        with together(engine, purpose) as shared:
            files = dcp.write_part(part, engine.rank, training_state.to_save(model, optimizer))
            files |= _write_json(part / f"random-{engine.rank}.json", random_state())
            if engine.rank == 0:
                files |= _write_json(part / _STATE, state)
            shared["files"] = {file: [entry.size_bytes, entry.sha256] for file, entry in files.items()}
        written = [theirs["files"] for theirs in shared.all]
        with together(engine, purpose):
            if engine.rank == 0:
                _finish(part, final, step=step, number=number(), written=written)
    except BaseException:
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def unfinished(final: Path, why: str) -> Path:
    """The name of what is on its way to `final` or from there."""
    return final.with_name(f".{final.name}.{secrets.token_hex(4)}.{why}")


def _finish(aside: Path, final: Path, *, step: int, number: int, written: list[dict[str, list[Any]]]) -> None:
    files = dcp.join_parts(aside, len(written))
    for theirs in written:
        files |= {name: Written(size_bytes=size, sha256=digest) for name, (size, digest) in theirs.items()}
    content = Manifest(number=number, step=step, world=len(written), files=files).to_json()
    with DigestedFiles().create_stream(aside / manifest.NAME, "wb") as file:
        file.write(content)
    sync_folder(aside)
    replaced = None
    if final.exists():  # this step was saved before, by a run that went on from an older one
        replaced = unfinished(final, "replaced")
        os.rename(final, replaced)
    try:
        os.rename(aside, final)
    except OSError:
        if replaced is not None:
            os.rename(replaced, final)
        raise
    sync_folder(final.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def load_checkpoint(path: str | os.PathLike, *, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Reads a checkpoint into `model` and `optimizer`, on any number of ranks, and returns its state. Collective.

    Each rank goes on with its own random numbers; one that the checkpoint has none of, on more ranks than saved
    it, is seeded from (the state's "seed", or 0; rank; step). A folder that is only DCP's, as FSDP2's scripts
    write, has no state, no random numbers and no digests: {} is returned. `optimizer`: None reads the model only.

    Before anything is overwritten: CheckpointCorrupt for damaged files, CheckpointDiffers for another model's or
    optimizer's, CheckpointFailed, all on every rank.
    """
    engine, path = engine_of(model), Path(path)
    if engine.phase.name == "OPEN":
        raise RuntimeError("load inside a minibatch: peers are reading the parameters")
    purpose = f"load {Path(*path.parts[-2:])}"
    with together(engine, purpose):
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is no checkpoint: there is no such folder")
        saved = _manifest(path)
        if saved is not None:
            saved.check_sizes(path)
            saved.check_digests(path, engine.rank, engine.world)
        metadata = dcp.read_metadata(path)
        state = read_state(path)
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


def read_state(path: Path) -> dict[str, Any]:
    """What `write_checkpoint` was given as `state`; {} for a folder that is only DCP's. Raises CheckpointCorrupt."""
    return json.loads((path / _STATE).read_bytes()) if _manifest(path) else {}


def verify(path: str | os.PathLike) -> None:
    """Reads all files of a checkpoint. Raises CheckpointCorrupt with the name of one that is damaged."""
    path = Path(path)
    found = Manifest.read(path)
    found.check_sizes(path)
    found.check_digests(path)


def _manifest(path: Path) -> Manifest | None:
    """None for a checkpoint that `write_checkpoint` did not write."""
    if not (path / manifest.NAME).exists() and not (path / _STATE).exists():
        return None
    return Manifest.read(path)


def _write_json(path: Path, content: Any) -> dict[str, Written]:
    files = DigestedFiles()
    with files.create_stream(path, "wb") as file:
        file.write(json.dumps(content).encode())
    return files.written
