"""A run's folder: the identity of its run, and a lock so that one job at a time writes to it."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from ..base.files import remove_left, require_replaceable
from ..base.options import flag
from ..data.store import contents
from .grpo_options import GrpoOptions
from .run_options import RunOptions
from .sft_options import SftOptions

# The names that `atomic_file` and `folder_aside` write under: with the process id and random digits.
_UNFINISHED = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{8}(\.new|\.old)?")
_WRITTEN_LAST = ("model", "adapter")


class RunFolder:
    """A run's `out`. Only rank 0 has one; its lock ends with the process, in any way."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def file(self, name: str) -> Path:
        return self.path / name

    def lock(self, *, resume: str) -> None:
        """Creates the folder, locks it for this job, and removes partial files of a killed job.

        Raises BlockingIOError while another job writes to it, FileExistsError for another run's folder unless resuming,
        OSError if it can't be written, or the model can't be in the end.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.file("run.json"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            reason = "it is a file" if self.path.is_file() else error.strerror
            raise OSError(f"{self.path} can't be written to ({reason}): give another --out") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise BlockingIOError(f"another job writes to {self.path}: wait for it, or give another --out") from None
        if resume == "never" and self._holds_run():
            self.release()
            raise FileExistsError(
                f"{self.path} holds another run: continue it with --resume auto, or give another --out"
            )
        for path in [*self.path.glob(".*"), *self.file("data").glob(".*")]:
            if found := _UNFINISHED.fullmatch(path.name):
                remove_left(path.with_name(found[1])) if path.is_dir() else path.unlink(missing_ok=True)
        for name in _WRITTEN_LAST:
            try:
                require_replaceable(self.file(name))
            except OSError:
                self.release()
                raise

    def take(self, identity: dict[str, Any]) -> bool:
        """After `lock`: True if the folder holds a run to resume; if not, it becomes this run's.

        Raises ValueError if that run's options differ.
        """
        if not self._holds_run():
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, json.dumps({"identity": identity}).encode(), 0)
            os.fsync(self._lock)
            return False
        self.check(identity)
        return True

    def check(self, identity: dict[str, Any]) -> None:
        """After `lock`: raises ValueError if the folder holds a run whose options differ.

        An identity without `prepared` is of a run that has not read its data yet: the rest is compared.
        """
        if not self._holds_run():
            return
        try:
            saved = json.loads(self._text())["identity"]
            if not isinstance(saved, dict):
                raise TypeError(f"the identity is {saved!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.file('run.json')} can't be read: give another --out") from error
        require_same(saved, identity, where=self.path)

    def _text(self) -> bytes:
        return os.pread(self._lock, os.fstat(self._lock).st_size, 0).strip()

    def _holds_run(self) -> bool:
        """True if a step was taken: a job that failed before the first step leaves the folder free."""
        metrics = self.file("metrics.jsonl")
        return (metrics.exists() and metrics.stat().st_size > 0) or any(self.path.glob("checkpoints/step-*"))

    def release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


# Options that a job had once, with what they were by default.
_REMOVED = {"decay_steps": 0, "balance": "mini"}
_JOBS: dict[str, type[RunOptions]] = {"sft": SftOptions, "grpo": GrpoOptions}
# The data's origin; files may have moved, so the data are compared.
_IN_THE_DATA = {"data", "eval_data", "tokenizer"}


def require_same(saved: dict[str, Any], wanted: dict[str, Any], *, where: Path) -> None:
    """Raises ValueError with every option in which the run in the folder `where` and this one differ.

    An option that `saved` lacks is newer than that run, which had its default. A position is counted in prepared
    samples, so `saved` has their digests; older runs have names of files in their folder instead. Data are compared if
    they are in `wanted`.
    """
    options = _JOBS[wanted.get("job", "sft")]
    defaults = options.defaults()
    saved = _REMOVED | defaults | saved
    wanted = _REMOVED | wanted
    files = [where / "data" / name for name in saved.get("prepared", ()) if "prepared" in wanted]
    if files and all(file.suffix == ".npz" and file.is_file() for file in files):
        saved["prepared"] = [contents(file) for file in files]
    names = wanted.keys() | saved.keys() - defaults.keys()
    if "prepared" in names:
        names -= _IN_THE_DATA if "prepared" in wanted else {*_IN_THE_DATA, "prepared"}
    missing = object()
    different = [name for name in sorted(names) if saved.get(name, missing) != wanted.get(name, missing)]
    if different:
        per_step = options.per_step()
        shown = {each: flag(each) for each in different} | {per_step: per_step.replace("_", " ")}
        words = "; ".join(
            "the samples differ, so the data, the tokenizer, or the most tokens of a sample changed"
            if name == "prepared"
            else f"{shown[name]} was {saved.get(name)!r} and is {wanted.get(name)!r}"
            for name in different
        )
        hint = f"; {shown[per_step]} are {flag(options.per_rank)} times the ranks" if per_step in different else ""
        raise ValueError(f"the run in {where} had other options ({words}{hint}): give the same, or another --out")
