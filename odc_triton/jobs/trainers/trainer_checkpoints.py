"""Trainers' checkpoints, the folders `checkpoint-N`: which are whole; how ranks write one and go on from it."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, sort_checkpoints

from ...base.errors import CheckpointCorrupt
from ...base.files import folder_aside, read_json_object, remove_folder
from ...checkpoint import save_pretrained
from ...checkpoint.failures import all_or_none
from ...checkpoint.folder import Manifest, load_checkpoint, verify, write_checkpoint
from ...checkpoint.write_pretrained import is_of_a_model

SHARDS = "odc"  # folder within a checkpoint: masters and optimizer states, see checkpoint/folder.py
_ITS_FILES = (SHARDS, OPTIMIZER_NAME, SCHEDULER_NAME, "scaler.pt", TRAINER_STATE_NAME, TRAINING_ARGS_NAME)


def is_of_a_checkpoint(name: str) -> bool:
    """True for a name of what Trainer writes into a checkpoint."""
    return name in _ITS_FILES or name.startswith("rng_state") or is_of_a_model(name)


def why_not_whole(checkpoint: Path, *, deep: bool = False) -> str | None:
    """What a checkpoint lacks for training to go on from it; None if nothing. `deep`: reads all of `odc/`."""
    try:
        if not checkpoint.is_dir():
            return "there is no such folder"
        if not (checkpoint / SHARDS).is_dir():
            return f"it has no complete {SHARDS}/ folder"
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


class SavedTrainer(Trainer):
    """The part of ShardedTrainer that saves models and checkpoints, and loads these."""

    _engine: Any
    _aside: str | None = None  # where a checkpoint is being written

    def _found(self, given: str | bool | None) -> str | bool | None:
        """The checkpoint to go on from, as rank 0 finds it. Raises CheckpointCorrupt, a ValueError, on all ranks."""
        if not given:
            return given
        with all_or_none(self._engine, "find the checkpoint") as shared, self._engine.barrier.working():
            if self._engine.rank == 0:  # it may read all of a checkpoint
                shared["found"] = find_checkpoint(given, Path(self.args.output_dir))
        return shared.all[0]["found"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes a folder for plain transformers, or PEFT, in the compute dtype. Every rank calls it; rank 0 writes."""
        with self._engine.naming_lost("save_model"):
            self._publish_edits("save the model")
            with all_or_none(self._engine, "save the model"), self._engine.barrier.working():
                super().save_model(output_dir, _internal_call)  # rank 0 reads the others' shards

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            made = folder / ".model"
            processor, source = self.processing_class, None
            if getattr(processor, "video_processor", "") is None:  # its files are copied, as it can't be made here
                source = processor.tokenizer.name_or_path or None
            save_pretrained(self.model, made, processor, processor=source, overwrite=True)
            files = {file.name for file in made.iterdir()}
            for name in files:  # checkpoints may be in the same folder
                if (made / name).is_dir():
                    shutil.rmtree(folder / name, ignore_errors=True)
                os.replace(made / name, folder / name)
            made.rmdir()
            if any(name.startswith("model") for name in files):  # not only adapters
                for old in {*folder.glob("model*")} - {folder / name for name in files}:
                    if is_of_a_model(old.name):  # transformers would load an older model.safetensors before new parts
                        old.unlink()
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's, under a temporary name: `checkpoint-N` is there once every rank has written all of it."""
        run, state, writes = self._get_output_dir(trial), self.state, self.args.should_save
        final = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        purpose = f"save {final.name}"
        with ExitStack() as writing:
            with all_or_none(self._engine, purpose) as shared:
                if writes:
                    aside = writing.enter_context(folder_aside(final, overwrite=True, replaces=is_of_a_checkpoint))
                    shared["aside"] = str(aside)
            self._aside = shared.all[0]["aside"]
            try:
                with all_or_none(self._engine, purpose):
                    super()._save_checkpoint(model, trial)
            finally:
                made, self._aside = Path(self._aside, final.name), None
            best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
            if best == final or best.is_dir():
                state.best_model_checkpoint = str(best)
            with all_or_none(self._engine, purpose), self._engine.barrier.working():
                if writes:
                    state.save_to_json(made / TRAINER_STATE_NAME)
                    for each in made.iterdir():
                        each.rename(aside / each.name)
                    made.rmdir()
                    writing.close()
                    if (limit := self.args.save_total_limit or 0) > 0:
                        paths = map(Path, sort_checkpoints(run, use_mtime=True))
                        old = [path for path in paths if path not in (final, best)]
                        for path in old[: max(0, len(old) + sum(map(Path.is_dir, {final, best})) - limit)]:
                            remove_folder(path)
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _get_output_dir(self, trial: Any) -> str:
        return self._aside or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._aside is None:  # else it is not whole yet
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        write_checkpoint(
            Path(output_dir, SHARDS),
            model=self.model,
            optimizer=self._plain_optimizer,
            state=self._loop_state(),
            step=self.state.global_step,
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)  # without accelerate's wrapper

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_checkpoint(Path(resume_from_checkpoint, SHARDS), model=self.model, optimizer=None)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            shards = Path(checkpoint, SHARDS)
            self._load_loop_state(load_checkpoint(shards, model=self.model, optimizer=self._plain_optimizer))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_NAME), weights_only=True))
