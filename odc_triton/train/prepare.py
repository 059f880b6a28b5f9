"""What a run needs before its model: the folder to write to, the tokenizer, the data, prepared once by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from ..base.config_file import write_config
from ..checkpoint import meta_causal_lm
from ..checkpoint.pretrained import require_weights
from ..comm.grid import grid_of
from ..data.order import Mix
from ..data.records import DataError
from ..data.tokenizer import read_tokenizer
from ..sharding.agree import patient_meetings
from .model import add_adapters, check_fit, require_peft
from .run_folder import RunFolder
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
    mix: Mix  # how often an epoch takes which of the data
    longest: int  # tokens of the longest sample
    largest_token: int
    identity: dict[str, Any]  # what a resumed run must have in common with this one
    folder: RunFolder | None
    goes_on: bool  # the folder holds a run to continue


def load_any_tokenizer(options: RunOptions) -> Any:
    """The run's tokenizer: the given one, or the model's."""
    return read_tokenizer(options.tokenizer or options.model)


def mix_of(options: RunOptions, sizes: Sequence[int]) -> Mix:
    """How often an epoch takes the samples or prompts of each --data. Raises ValueError, naming the option."""
    try:
        return Mix(tuple(sizes), options.data_weight)
    except ValueError as error:
        raise ValueError(f"--data-weight: {error}") from error


def take_folder(
    options: RunOptions, read: Callable[[RunFolder], dict[str, Any]], *, mesh: DeviceMesh
) -> tuple[dict[str, Any], RunFolder | None]:
    """Rank 0 takes the folder and reads the data; what it read, on every rank, and rank 0's folder. Collective.

    `read` returns JSON whose `prepared` are digests of the data. The result also has `identity` and `goes_on`.
    """
    if options.lora_rank:
        require_peft()
    require_trackers(options.report_to)
    folder = RunFolder(options.out)

    def take() -> dict[str, Any]:
        folder.lock(resume=options.resume)
        try:
            made = read(folder)
            identity = options.identity(mesh.size()) | {"prepared": made["prepared"]}
            goes_on = folder.take(identity)
            repeat = f"odc-triton train {options.job} --config {folder.file(CONFIG)} --out ANOTHER_FOLDER"
            write_config(folder.file(CONFIG), options, comment=f"To repeat this run: {repeat}", ranks=mesh.size())
            return made | {"goes_on": goes_on, "identity": identity}
        except BaseException:
            folder.release()
            raise

    made = _on_rank_0(take, mesh, timedelta(minutes=options.timeout_minutes))
    return made, folder if mesh.get_rank() == 0 else None


# What `_on_rank_0` raises on the other ranks: the first of these that rank 0's error is an instance of.
_ERRORS = (DataError, BlockingIOError, FileExistsError, FileNotFoundError, PermissionError, OSError, ValueError)


def _on_rank_0(make: Callable[[], dict[str, Any]], mesh: DeviceMesh, timeout: timedelta) -> dict[str, Any]:
    """Calls `make()` on rank 0, however long it takes, and returns its result (JSON) or raises its error on every rank.

    Raises RankLost.
    """
    message: dict[str, Any] = {}
    error: Exception | None = None
    with patient_meetings(grid_of(mesh), timeout) as meetings:
        if mesh.get_rank() == 0:
            try:
                message = {"made": make()}
            except (OSError, ValueError) as raised:
                error = raised
                number = next(i for i, kind in enumerate(_ERRORS) if isinstance(error, kind))
                message = {"error": [number, str(error)]}
        message = meetings.meet("rank 0 prepares the data", message)[0]
    if error is not None:
        raise error
    if "error" in message:
        number, text = message["error"]
        raise _ERRORS[number](text)
    return message["made"]


def check_before_start(options: RunOptions, largest_token: int) -> None:
    """Raises OSError and ValueError for what would fail later in the run. Leaves nothing except the folder `out`.

    `largest_token`: of the first of the data.
    """
    require_trackers(options.report_to)
    model = meta_causal_lm(model=options.model, init=options.init)
    if options.model is not None and Path(options.model).is_dir():
        require_weights(options.model)
    check_fit(model, longest=0, largest_token=largest_token)
    if options.lora_rank:
        add_adapters(model, rank=options.lora_rank, alpha=options.lora_alpha, targets=options.lora_targets)
    if options.resume not in ("auto", "never") and not Path(options.resume).is_dir():
        raise FileNotFoundError(
            f"--resume {options.resume}: there is no such folder; give auto, or a checkpoint: OUT/checkpoints/step-…"
        )
    folder = RunFolder(options.out)
    folder.lock(resume=options.resume)
    folder.release()
