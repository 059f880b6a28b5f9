"""A job for tests of the command's start: ODC_TEST_START says what fails, a rank's pid goes into ODC_TEST_FOLDER."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_RANK, _FAULT = os.environ.get("RANK"), os.environ.get("ODC_TEST_START")
if _RANK is not None:
    Path(os.environ["ODC_TEST_FOLDER"], f"imported-{_RANK}").write_text(str(os.getpid()))
    if _FAULT == "an import kills" and _RANK == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if _FAULT == "an import fails" and _RANK == "1":
        raise ImportError("no such library")


@dataclass
class Options:
    fault: str
    folder: Path
    timeout_minutes: float


def check_before_start(options: Options, ranks: int) -> None:
    (options.folder / "checked").write_text(str(os.getpid()))
    while options.fault == "refused, late" and sum(bool(p.read_text()) for p in options.folder.glob("imported-*")) < 2:
        time.sleep(0.01)
    if options.fault.startswith("refused"):
        raise ValueError("no such data")
    if options.fault == "the check is killed":
        os.kill(os.getpid(), signal.SIGKILL)


def run(options: Options) -> None:
    if options.fault == "stopped" and os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    (options.folder / f"ran-{os.environ['RANK']}").write_text(str(os.getpid()))
