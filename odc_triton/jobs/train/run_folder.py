"""A run's folder: the identity of its run, and a lock so that one job at a time writes to it. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

from ...base.files import link_or_copy, remove_left, require_replaceable
from ..data.store import contents
from ..options.options import flag
from .grpo_options import GrpoOptions
from .metrics import Metrics, read_metrics
from .pairs_options import DpoOptions, OrpoOptions, RewardOptions
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
        self._lock = -1  # a file descriptor

    def file(self, name: str) -> Path:
        return self.path / name

    def lock(self, *, resume: str) -> None:
        """Creates the folder, locks it for this job, and removes partial files of a killed job.

        Raises BlockingIOError while another job writes to it, FileExistsError for a model's folder, and a run's unless
        resuming that one, OSError if it can't be written, or the model can't be in the end.
        """
        if not self.file("run.json").exists() and any(self.path.glob("*.safetensors")):
            raise FileExistsError(
                f"{self.path} is a model's folder, and a run writes its model into a folder in --out: give another one"
            )
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
        try:
            if self._holds_run() and not self.goes_on(resume):
                raise FileExistsError(self._refusal(resume))
            for path in [*self.path.glob(".*"), *self.file("data").glob(".*")]:
                if found := _UNFINISHED.fullmatch(path.name):
                    remove_left(path.with_name(found[1])) if path.is_dir() else path.unlink(missing_ok=True)
            for name in _WRITTEN_LAST:
                require_replaceable(self.file(name))
        except BaseException:
            self.release()
            raise

    def _refusal(self, resume: str) -> str:
        if os.path.dirname(os.path.realpath(resume)) == os.path.realpath(self.file("checkpoints")):
            return (
                f"--resume {resume} is not the newest checkpoint of the run in {self.path}, and going back would lose "
                f"what came after it: give another --out, for a branch, or --resume auto to go on"
            )
        if step := self.ended_step:
            return (
                f"{self.path} holds a run that has ended after step {step}: give another --out, or --resume auto with "
                f"more --steps to train on"
            )
        return f"{self.path} holds a run already: continue it with --resume auto, or give another --out"

    def goes_on(self, resume: str) -> bool:
        """After `lock`: True if `resume` continues a run here where it stands: it is auto, the newest checkpoint, or
        the one of another run that this one, a branch, began with.
        """
        if resume in ("auto", "never") or not self._holds_run():
            return resume == "auto"
        from ..checkpoints.steps import newest_in

        with contextlib.suppress(OSError, ValueError):
            newest, path = newest_in(self.file("checkpoints")), os.path.realpath(resume)
            return path in (self.branch, newest and os.path.realpath(newest))
        return False

    def take(self, identity: dict[str, Any], *, resume: str = "auto") -> bool:
        """After `lock`: True if the folder holds a run to resume. From now on it is that of `identity`; the checkpoint
        `resume` that it shall begin with becomes one of its own.

        Raises ValueError if that run's options differ and may not, OSError.
        """
        record: dict[str, Any] = {"ended": None}
        if resumes := self._holds_run():
            self.check(identity)
            record = self._record()
        elif resume not in ("auto", "never"):
            record["branch"] = os.path.realpath(resume)
        self._write(record | {"identity": identity})
        if not resumes and "branch" in record:
            from ...checkpoint.folder import unfinished

            own = self.file("checkpoints") / Path(record["branch"]).name
            own.parent.mkdir(exist_ok=True)
            link_or_copy(record["branch"], made := unfinished(own, "saving"))
            os.rename(made, own)
            return True
        return resumes

    @property
    def identity(self) -> dict[str, Any] | None:
        """After `lock`: that of the run here, if there is one."""
        return self._record()["identity"] if self._holds_run() else None

    @property
    def branch(self) -> str | None:
        """After `take`: the checkpoint of another run that this one began with."""
        return self._record().get("branch")

    def check(self, identity: dict[str, Any]) -> str:
        """After `lock`: raises ValueError if the folder holds a run whose options differ and may not. Returns those
        that differ and may, in words.

        An identity without `prepared` is of a run that has not read its data yet: the rest is compared.
        """
        return require_same(self._record()["identity"], identity, where=self.path) if self._holds_run() else ""

    def end(self, step: int) -> None:
        """After `take`: the model after `step`, the run's last, is written."""
        record = self._record()
        self._write(record | {"ended": {"step": step, "length": _length(record["identity"])}})

    @property
    def ended_step(self) -> int:
        """After `lock`: the last step of the run whose model is here; 0 if it has not come to its end."""
        written = [self.file(f"{name}/{file}") for name, file in _WRITTEN_LAST.items()]
        times = [each.stat().st_mtime_ns for each in written if each.is_file()]
        if not times or not self._holds_run():
            return 0
        record = self._record()
        if "ended" in record:
            return (record["ended"] or {}).get("step", 0)
        metrics = self.file("metrics.jsonl")  # of an older version, which wrote its model last
        lines = read_metrics(metrics)
        return lines[-1]["step"] if lines and max(times) >= metrics.stat().st_mtime_ns else 0

    def has_ended(self, identity: dict[str, Any]) -> bool:
        """After `lock`: True if the run here is over, and `identity` is of the same length. Raises ValueError if it is
        of another, and there is no checkpoint.
        """
        if not self.ended_step:
            return False
        record = self._record()
        if (record.get("ended") or {}).get("length", _length(record["identity"])) == _length(identity):
            return True
        if not any(self.path.glob("checkpoints/step-*")):
            raise ValueError(
                f"the run in {self.path} has ended and has no checkpoint to go on from: begin another one with its "
                f"model, --model {self.file('model')}, in another --out"
            )
        return False

    def _write(self, record: dict[str, Any]) -> None:
        """A line: what a process that is killed between the two calls leaves of a longer one follows it."""
        line = json.dumps(record).encode() + b"\n"
        if os.pread(self._lock, len(line) + 1, 0) == line:
            return
        os.pwrite(self._lock, line, 0)
        os.ftruncate(self._lock, len(line))
        os.fsync(self._lock)

    def _record(self) -> dict[str, Any]:
        try:
            record = json.loads(os.pread(self._lock, os.fstat(self._lock).st_size, 0).partition(b"\n")[0])
            if not isinstance(record["identity"], dict):
                raise TypeError(f"the identity is {record['identity']!r}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.file('run.json')} is missing or damaged: give another --out") from error
        return record

    def _holds_run(self) -> bool:
        """True if a step was taken: a job that failed before the first step leaves the folder free."""
        metrics = self.file("metrics.jsonl")
        return (metrics.exists() and metrics.stat().st_size > 0) or any(self.path.glob("checkpoints/step-*"))

    def release(self) -> None:
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1


def report_ended(folder: RunFolder, options: RunOptions, changed: str) -> Metrics:
    """The last metrics of a run that is over. Says so. `changed`: options, in words."""
    (metrics,) = read_metrics(folder.file("metrics.jsonl"))[-1:] or [{"step": 0, "tokens": 0}]
    print(
        f"the run in {folder.path} has ended after step {metrics['step']}: {options.model_folder} has its weights. "
        f"Nothing was changed. To train on, give more {'--epochs or ' * hasattr(options, 'epochs')}--steps"
        + ", or after an early end another --early-stopping" * bool(options.early_stopping)
        + f"; no step is left for what was changed: {changed}" * bool(changed),
        flush=True,
    )
    return metrics


def _length(identity: dict[str, Any]) -> list[Any]:
    """Of a run that may end early also after how many evaluations."""
    early = identity.get("early_stopping")
    return [identity.get(name) for name in ("steps", "epochs")] + [early] * bool(early)


# Options that a job had once, with what they were by default.
_REMOVED = {"decay_steps": 0, "balance": "mini"}
_KINDS: tuple[type[RunOptions], ...] = (SftOptions, GrpoOptions, DpoOptions, OrpoOptions, RewardOptions)
_JOBS = {kind.job: kind for kind in _KINDS}


def options_of(identity: dict[str, Any]) -> type[RunOptions]:
    """The class of a run's options, by its identity."""
    return _JOBS.get(identity.get("job", "sft"), RunOptions)


# The data's origin; files may have moved, so the data are compared.
_IN_THE_DATA = {"data", "eval_data", "tokenizer"}


def require_same(saved: dict[str, Any], wanted: dict[str, Any], *, where: Path) -> str:
    """Raises ValueError with every option in which the run in the folder `where` and this one differ, and may not.
    Returns those in which they may, in words.

    An option that `saved` lacks is newer than that run, which had its default. A position is counted in prepared
    samples, so `saved` has their digests; older runs have names of files in their folder instead. Data are compared if
    they are in `wanted`; a model by what is in its folder, if both have that.
    """
    jobs = [each.get("job", "sft") for each in (saved, wanted)]
    if jobs[0] != jobs[1]:
        raise ValueError(f"the run in {where} is one of train {jobs[0]}, not of train {jobs[1]}: give another --out")
    options = _JOBS[jobs[1]]
    defaults = {name: [] if value == () else value for name, value in options.defaults().items()}
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
            given = ", ".join(shown(each) for each in sorted(_IN_THE_DATA) if differs(each))
            why = "so the data, the tokenizer, or the most tokens of a sample changed"
            return f"the samples differ, {why}: {given}" if given else f"the samples differ, {why}"
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
