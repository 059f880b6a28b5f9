"""Preparation of a run before its model: the folder to write to, the tokenizer, the data, prepared once by rank 0."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...checkpoint.folder import MANIFEST, Manifest, read_state
from ...checkpoint.pretrained_files import PretrainedFiles, weights_folder
from ...comm.grid import grid_of
from ...optim import adamw8bit
from ...packs.enable import innermost
from ...plan.order import Mix
from ...sharding.agree import watched_barrier
from ..checkpoints.steps import newest_in
from ..data.records import DataError
from ..data.templates import with_template
from ..data.tokenizer import read_tokenizer
from ..options.config_file import write_config
from ..options.options import flag
from .metrics import Metrics
from .model import build_model, frozen_options, require_peft
from .push import require_hub
from .run_folder import RunFolder, report_ended, require_same
from .run_options import RunOptions
from .trackers import require_trackers

Data = TypeVar("Data")
CONFIG = "run.yaml"


@dataclass(frozen=True, kw_only=True)
class Prepared(Generic[Data]):
    """The same on every rank except `folder`, which only rank 0 has."""

    tokenizer: Any
    data: Data
    evaluation: Data | None
    mix: Mix  # of the data in an epoch
    longest: int  # tokens of the longest sample
    largest_token: int
    identity: dict[str, Any]  # must be the same in a resumed run
    folder: RunFolder | None
    resumes: bool  # the folder holds a run to continue
    branch: str | None  # the checkpoint of another run that this one began with
    ended_step: int  # the last step of the run whose model is in the folder; 0: none


class HasEnded(Exception):
    """The run in the folder is over, and nothing is left to do. `metrics`: its last ones."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__("the run has ended")
        self.metrics = metrics


def load_any_tokenizer(options: RunOptions) -> Any:
    """The run's tokenizer: the given one, or the model's, with the run's chat template."""
    return with_template(read_tokenizer(options.tokenizer or options.architecture), options.chat_template)


def mix_of(options: RunOptions, sizes: Sequence[int], ranks: int) -> Mix:
    """The mix of the samples or prompts of each --data in an epoch.

    Raises ValueError, naming the option, also for an epoch that is shorter than a step.
    """
    try:
        mix = Mix(tuple(sizes), options.data_weight)
    except ValueError as error:
        raise ValueError(f"--data-weight: {error}") from error
    per_rank, things = getattr(options, options.per_rank), options.per_rank.removesuffix("_per_rank")
    if len(mix) < per_rank * ranks:
        raise ValueError(
            f"{', '.join(options.data)}: an epoch has {len(mix)} {things} and one step takes {per_rank} on each of "
            f"{ranks} ranks: lower {flag(options.per_rank)}, or give more data"
        )
    return mix


@contextlib.contextmanager
def take_folder(
    options: RunOptions, read: Callable[[RunFolder], dict[str, Any]], *, mesh: DeviceMesh
) -> Iterator[tuple[dict[str, Any], RunFolder | None]]:
    """Rank 0 takes the folder and reads the data. Gives (the result of `read`, rank 0's folder), which an error in the
    block releases. Collective.

    `read` returns JSON whose `prepared` are digests of the data. The result also has what `Prepared` has of a run
    before. Raises HasEnded if the run in the folder is over.
    """
    if options.lora_rank:
        require_peft()
    elif options.quantize is not None:
        raise ValueError(f"--quantize is {options.quantize}, for a frozen base only: give --lora-rank too")
    if options.quantize is not None:
        adamw8bit.functional(needed_by="--quantize")
    require_trackers(options.report_to)
    folder = RunFolder(options.out)

    def take() -> dict[str, Any]:
        if options.push_to_hub is not None:
            require_hub(options.push_to_hub)
        folder.lock(resume=options.resume)
        try:
            identity = identity_of(options, folder, mesh.size(), mesh.device_type)
            changed = _check_resumed(options, folder, identity)  # before all the data are read
            if folder.goes_on(options.resume) and folder.has_ended(identity):
                return {"ended": report_ended(folder, options, changed)}
            made = read(folder)
            identity |= {"prepared": made["prepared"]}
            resumes = folder.take(identity, resume=options.resume)
            config = shlex.quote(str(folder.file(CONFIG)))
            repeat = f"odc-triton train {options.job} --config {config} --out ANOTHER_FOLDER"
            comment = f"The options of the last start. To train with them again: {repeat}"
            write_config(folder.file(CONFIG), options, comment=comment, ranks=mesh.size())
            before = {"resumes": resumes, "branch": folder.branch, "ended_step": folder.ended_step}
            return made | {"before": before, "identity": identity}
        except BaseException:
            folder.release()
            raise

    made = on_rank_0(take, mesh, timedelta(minutes=options.timeout_minutes))
    try:
        if "ended" in made:
            raise HasEnded(made["ended"])
        yield made, folder if grid_of(mesh).rank == 0 else None
    except BaseException:
        folder.release()
        raise


# The errors of `on_rank_0` on the other ranks: the first of these that rank 0's error is an instance of.
_ERRORS = (DataError, BlockingIOError, FileExistsError, FileNotFoundError, PermissionError, OSError, ValueError)


def on_rank_0(make: Callable[[], dict[str, Any]], mesh: DeviceMesh, timeout: timedelta) -> dict[str, Any]:
    """Calls `make()` on rank 0, for any time, and returns its result (JSON) or raises its error on every rank.

    Raises RankLost, and DeadlineExceeded once rank 0 has shown no sign of life for `timeout`.
    """
    message: dict[str, Any] = {}
    error: Exception | None = None
    with watched_barrier(grid_of(mesh), timeout) as barrier:
        if barrier.rank == 0:
            try:
                with barrier.working():
                    message = {"made": make()}
            except (OSError, ValueError) as raised:
                error = raised
                number = next(i for i, kind in enumerate(_ERRORS) if isinstance(error, kind))
                message = {"error": [number, str(error)]}
        message = barrier.exchange("rank 0 prepares the data", message)[0]
    if error is not None:
        raise error
    if "error" in message:
        number, text = message["error"]
        raise _ERRORS[number](text)
    return message["made"]


def identity_of(options: RunOptions, folder: RunFolder, ranks: int, device: str) -> dict[str, Any]:
    """With the dtype of compute: without --dtype that of the run which goes on, if there is one."""
    saved: dict[str, Any] = {}
    if options.dtype is None and options.resume != "never":
        with contextlib.suppress(OSError, ValueError, KeyError):  # `_check_resumed` says what is wrong
            goes_on = folder.goes_on(options.resume)
            saved = (folder.identity if goes_on else read_state(Path(options.resume))["identity"]) or {}
    return options.identity(ranks) | {"dtype": saved.get("dtype") or options.on(device).dtype}


def _check_resumed(options: RunOptions, folder: RunFolder, identity: dict[str, Any]) -> str:
    """Raises OSError and ValueError if the resumed run had other options, its data aside, or is no checkpoint. Returns
    the options in which the folder's run differs, and may, in words.
    """
    changed = folder.check(identity)
    if options.resume == "never" or folder.goes_on(options.resume):
        return changed
    path = Path(options.resume)
    if not path.is_dir():
        raise FileNotFoundError(
            f"--resume {path}: there is no such folder; give auto, or a checkpoint: OUT/checkpoints/step-…"
        )
    if not (path / MANIFEST).exists():
        newest = newest_in(path / "checkpoints") or newest_in(path) or "OUT/checkpoints/step-…"
        raise ValueError(f"--resume {path} is no checkpoint of a run: give auto, or a checkpoint: {newest}")
    Manifest.read(path).check_sizes(path)
    try:
        saved = read_state(path)["identity"]
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"--resume {path} has no position of a run: give a checkpoint of train {options.job}"
        ) from error
    require_same(saved, identity, where=path.absolute().parent.parent)
    return changed


def _has_tokens(model: str, tokenizer: Any, *, otherwise: bool) -> bool:
    """True if the model's own tokenizer has all tokens of `tokenizer`, by the same numbers; without one `otherwise`."""
    try:
        return tokenizer.get_vocab().items() <= read_tokenizer(model).get_vocab().items()
    except (OSError, ValueError):
        return otherwise


def check_before_start(options: RunOptions, ranks: int, tokenizer: Any, *, longest: int, largest_token: int) -> None:
    """Raises OSError and ValueError for errors that would occur later in the run. Leaves only the folder `out`.

    `longest`: tokens of the longest of the first samples; `largest_token`: of these.
    """
    require_trackers(options.report_to)
    if options.push_to_hub is not None:
        require_hub(options.push_to_hub)
    if options.optimizer == "adamw-8bit":
        adamw8bit.functional()
    sizes = {"longest": longest, "largest_token": largest_token, "rank": 1}  # not 0, which prints
    model, _ = build_model(options, tokenizer, **sizes)
    if options.teacher is not None:
        try:
            teacher, _ = build_model(frozen_options(options, options.teacher), tokenizer, **sizes)
        except ValueError as error:
            raise ValueError(f"--teacher {options.teacher}: {error}") from error
        words = [innermost(each).config.get_text_config().vocab_size for each in (model, teacher)]
        if not _has_tokens(options.teacher, tokenizer, otherwise=words[0] == words[1]):
            raise ValueError(
                f"--teacher {options.teacher} has a vocab_size of {words[1]} and the model one of {words[0]}, and no "
                f"tokenizer with the model's tokens: the divergence is of distributions over the same tokens, so give "
                f"a teacher of the same family"
            )
    for folder in (options.model, options.teacher):
        if folder is not None and Path(folder).is_dir():
            PretrainedFiles(weights_folder(folder))  # raises if it has no weights to read
    folder = RunFolder(options.out)
    folder.lock(resume=options.resume)
    try:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        _check_resumed(options, folder, identity_of(options, folder, ranks, device))
    finally:
        folder.release()
