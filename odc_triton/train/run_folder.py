"""A run's folder: the identity of its run, and a lock so that one job at a time writes to it."""

from __future__ import annotations

import contextlib
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
from .run_options import PATHS, RunOptions
from .sft_options import SftOptions

# The names that `atomic_file` and `folder_aside` write under: with the process id and random digits.
_UNFINISHED = re.compile(r"\.(.+)\.\d+\.[0-9a-f]{8}(\.new|\.old)?")
# What a run writes at its end, with a file that is in it then.
_WRITTEN_LAST = {"model": "config.json", "adapter": "adapter_config.json"}


class RunFolder:
    """A run's `out`. Only rank 0 has one; its lock ends with the process, in any way."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def file(self, name: str) -> Path:
        return self.path / name

    def lock(self, *, resume: str) -> None:
        """Creates the folder, locks it for this job, and removes partial files of a killed job.

        Raises BlockingIOError while another job writes to it, FileExistsError for another run's folder unless resuming
        that one, OSError if it can't be written, or the model can't be in the end.
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
        if self._holds_run() and (resume == "never" or not self._is_own(resume)):
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

    def _is_own(self, resume: str) -> bool:
        """True if `resume` goes on with the run here: auto, one of its checkpoints, or the one that it began with."""
        inside = os.path.realpath(Path(resume).parent) == os.path.realpath(self.file("checkpoints"))
        return resume == "auto" or inside or self.goes_on(resume)

    def goes_on(self, resume: str) -> bool:
        """After `lock`: True if this is the run to continue where it stands: `resume` is auto, or the checkpoint of
        another run that this one, a branch, began with.
        """
        if resume == "auto" or not self._holds_run():
            return resume == "auto"
        with contextlib.suppress(ValueError):
            return self.branch == os.path.realpath(resume)
        return False

    def take(self, identity: dict[str, Any], *, resume: str = "auto") -> bool:
        """After `lock`: True if the folder holds a run to resume. From now on it is that of `identity`.

        Raises ValueError if that run's options differ and may not.
        """
        resumes = self._holds_run()
        if resumes:
            self.check(identity)
            branch = self.branch
        else:
            branch = None if resume in ("auto", "never") else os.path.realpath(resume)
        self._write({"identity": identity} | ({} if branch is None else {"branch": branch}))
        return resumes

    @property
    def branch(self) -> str | None:
        """After `take`: the checkpoint of another run that this one began with."""
        return self._record().get("branch")

    def check(self, identity: dict[str, Any]) -> None:
        """After `lock`: raises ValueError if the folder holds a run whose options differ and may not.

        An identity without `prepared` is of a run that has not read its data yet: the rest is compared.
        """
        if self._holds_run():
            require_same(self._record()["identity"], identity, where=self.path)

    def end(self) -> None:
        """After `take`: the run's model is written."""
        self._write(self._record() | {"ended": True})

    def has_ended(self, identity: dict[str, Any]) -> bool:
        """After `lock`: True if the run here is over, and `identity` is not of a longer one."""
        if not self._holds_run() or not any(
            self.file(f"{name}/{file}").is_file() for name, file in _WRITTEN_LAST.items()
        ):
            return False
        if not any(self.path.glob("checkpoints/step-*")):  # of an older version: there is nothing to continue
            return True
        record = self._record()
        return "ended" in record and all(record["identity"].get(n) == identity.get(n) for n in ("steps", "epochs"))

    def _write(self, record: dict[str, Any]) -> None:
        """A line: what a process that is killed between the two calls leaves of a longer one follows it."""
        line = json.dumps(record).encode() + b"\n"
        os.pwrite(self._lock, line, 0)
        os.ftruncate(self._lock, len(line))
        os.fsync(self._lock)

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads(os.pread(self._lock, os.fstat(self._lock).st_size, 0).partition(b"\n")[0])
            if not isinstance(record["identity"], dict):
                raise TypeError(f"the identity is {record['identity']!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.file('run.json')} can't be read: give another --out") from error
        return record

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


def require_same(saved: dict[str, Any], wanted: dict[str, Any], *, where: Path) -> str:
    """Raises ValueError with every option in which the run in the folder `where` and this one differ, and may not.
    Returns those in which they may, in words.

    An option that `saved` lacks is newer than that run, which had its default. A position is counted in prepared
    samples, so `saved` has their digests; older runs have names of files in their folder instead. Data are compared if
    they are in `wanted`; a model by what is in its folder, if both have that.
    """
    options = _JOBS[wanted.get("job", "sft")]
    defaults = options.defaults()
    saved = _REMOVED | defaults | saved
    wanted = _REMOVED | wanted
    files = [where / "data" / name for name in saved.get("prepared", ()) if "prepared" in wanted]
    if files and all(file.suffix == ".npz" and file.is_file() for file in files):
        saved["prepared"] = [contents(file) for file in files]
    names = (wanted.keys() | saved.keys() - defaults.keys()) - {"contents"}
    if "prepared" in names:
        names -= _IN_THE_DATA if "prepared" in wanted else {*_IN_THE_DATA, "prepared"}
    per_step = options.per_step()

    def differs(name: str) -> bool:
        missing = object()
        old, new = (each.get(name, missing) for each in (saved, wanted))
        if name in PATHS and isinstance(old, str) and isinstance(new, str):
            was, now = (each.get("contents", {}).get(name) for each in (saved, wanted))
            return os.path.realpath(old) != os.path.realpath(new) if None in (was, now) else was != now
        return old != new

    def shown(name: str) -> str:
        if name == "prepared":
            return "the samples differ, so the data, the tokenizer, or the most tokens of a sample changed"
        if name in PATHS and saved.get(name) == wanted.get(name):
            return f"the files of {flag(name)} {saved[name]} have changed"
        label = per_step.replace("_", " ") if name == per_step else flag(name)
        return f"{label} was {saved.get(name)!r} and is {wanted.get(name)!r}"

    different = sorted(filter(differs, names))
    if refused := [name for name in different if name not in options.adjustable]:
        words = "; ".join(map(shown, refused))
        hint = f"; {per_step.replace('_', ' ')} are {flag(options.per_rank)} times the ranks" * (per_step in refused)
        raise ValueError(
            f"the run in {where} had other options ({words}{hint}): give the same, or another --out; to begin there "
            f"with this run's weights, give --model what odc-triton export writes"
        )
    return "; ".join(map(shown, different))
