"""Trainers' checkpoints, the folders `checkpoint-N`: which of them are whole, and from which one a run goes on."""

from __future__ import annotations

from pathlib import Path

from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ...base.errors import CheckpointCorrupt
from ...base.files import read_json_object
from ...checkpoint.folder import Manifest, verify
from ...checkpoint.write_pretrained import is_of_a_model

SHARDS = "odc"  # folder within a checkpoint: masters and optimizer states, see checkpoint/folder.py
_NO_SHARDS = f"it has no complete {SHARDS}/ folder"
_ITS_FILES = (SHARDS, OPTIMIZER_NAME, SCHEDULER_NAME, "scaler.pt", TRAINER_STATE_NAME, "training_args.bin")


def is_of_a_checkpoint(name: str) -> bool:
    """True for a name of what Trainer writes into a checkpoint."""
    return name in _ITS_FILES or name.startswith("rng_state") or is_of_a_model(name)


def why_not_whole(checkpoint: Path, *, deep: bool = False) -> str | None:
    """What a checkpoint lacks for training to go on from it; None if nothing. `deep`: reads all of `odc/`."""
    try:
        for folder, problem in ((checkpoint, "there is no such folder"), (checkpoint / SHARDS, _NO_SHARDS)):
            if not folder.is_dir():
                return problem
        Manifest.read(checkpoint / SHARDS)
        read_json_object(checkpoint / TRAINER_STATE_NAME, "it is not whole")
        if not (checkpoint / SCHEDULER_NAME).is_file():
            return f"it has no {SCHEDULER_NAME}"
        if deep:
            verify(checkpoint / SHARDS)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def find_checkpoint(given: str | Path | bool, output: Path) -> str | bool:
    """The checkpoint `given`, or for True the newest whole one in `output`, and True if there is none at all; prints
    which newer ones were left out. Raises CheckpointCorrupt for one that is not whole, and names the newest that is.
    """
    if given is not True:
        path, problem = Path(given), why_not_whole(Path(given))
        if problem is not None:
            raise _refusal(path, problem, _newest(path.absolute().parent)[0])
        return str(given)
    found, left = _newest(output)
    for path, problem in left.items():
        if found is None or _is_of_another(path):
            raise _refusal(path, problem, found)
    if left:
        words = "; ".join(f"{path.name}, as {problem}" for path, problem in left.items())
        print(f"resuming from {found}, the newest whole checkpoint: left out {words}", flush=True)
    return True if found is None else str(found)


def _newest(output: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest whole checkpoint in `output`, and why newer ones are not."""
    numbers = {
        path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in output.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    }
    folders = [path for path, number in numbers.items() if number.isdecimal() and path.is_dir()]
    left: dict[Path, str] = {}
    for path in sorted(folders, key=lambda path: int(numbers[path]), reverse=True):
        problem = why_not_whole(path, deep=True)
        if problem is None:
            return path, left
        left[path] = problem
    return None, left


def _is_of_another(checkpoint: Path) -> bool:
    """True for one that was written to its end without `odc/`: by plain Trainer, or with `save_only_model`."""
    names = {path.name for path in checkpoint.iterdir()}
    is_other = OPTIMIZER_NAME in names or SCHEDULER_NAME not in names  # else only the removal of `odc/` was interrupted
    return TRAINER_STATE_NAME in names and SHARDS not in names and is_other


def _refusal(checkpoint: Path, problem: str, newest: Path | None) -> CheckpointCorrupt:
    instead = "there is no whole one next to it" if newest is None else f"the newest whole one is {newest}"
    return CheckpointCorrupt(f"training can't go on from {checkpoint}, as {problem}; {instead}")
