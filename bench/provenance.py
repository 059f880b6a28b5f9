"""What a result was measured on, and the files that it is written to. Needs no torch.

A result is a JSON file, written whole; what a kill must not lose is appended to a file of lines, one JSON object each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
_PACKAGES = ("torch", "triton", "transformers", "numpy")


def about() -> dict[str, Any]:
    """What every result says about its origin."""
    return {"hardware": hardware(), "versions": versions(), "commit": commit()}


def save_json(path: Path, data: object) -> None:
    """Writes atomically, so that a reader never sees half of it."""
    from odc_triton.base.files import write_file

    write_file(path, (json.dumps(data, indent=1) + "\n").encode())


def save_parts(path: Path, **parts: object) -> None:
    """Replaces these keys of a result that several programs write."""
    before = json.loads(path.read_bytes()) if path.exists() else {}
    save_json(path, {**before, **parts})


def options_of(about: str | None, *, out: str = "--out", **defaults: Any) -> argparse.Namespace:
    """The command line of a suite: `out`, which may be positional, and an option for each of `defaults`.

    False is that of a flag, a list that of one or more such values, a tuple that of one or more of these values.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(out, type=Path, help="JSON file, whose other keys stay")
    for name, default in defaults.items():
        how: dict[str, Any] = {"type": type(default), "help": f"default: {default}"}
        if default is False:
            how = {"action": "store_true", "help": "small sizes, which measure nothing: to see that it runs"}
        elif isinstance(default, list | tuple):
            how |= {"type": type(default[0]), "nargs": "+"}
            how |= {"choices": default} if isinstance(default, tuple) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return parser.parse_args()


def versions() -> dict[str, str]:
    """`odc-triton`: of the code that runs; an editable installation's metadata may be older."""
    import odc_triton
    from odc_triton.base.environment import installed

    return {"python": platform.python_version(), "odc-triton": odc_triton.__version__} | installed(*_PACKAGES)


def hardware() -> str:
    """The processor's name and the number of cores that this process may use."""
    from odc_triton.sharding.backend import processor_name

    return f"{processor_name()}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """The checkout's commit, marked if files differ from it. Outside a checkout ODC_COMMIT, or "unknown"."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not (ROOT / ".git").exists():  # installed, perhaps within somebody else's repository
            return os.environ.get("ODC_COMMIT", "unknown")
        return git("rev-parse", "HEAD") + (" and uncommitted changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ODC_COMMIT", "unknown")


def gpu() -> dict[str, str] | None:
    """The GPU that torch uses: name, memory, and nvidia-smi's driver, clocks and power limit; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    found = {
        "name": properties.name,
        "arch": f"sm_{properties.major}{properties.minor}",
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "l2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "cuda": str(torch.version.cuda),
    }
    fields = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "temperature.gpu")
    command = ["nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return found | {"nvidia-smi": f"did not answer: {error}"}
    return found | dict(zip(fields, (value.strip() for value in done.stdout.split(",")), strict=False))


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one line in one write: readers and other writers never see half of it. Closes a line that a kill left
    unfinished first.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        os.write(file, b"\n" * torn + json.dumps(record).encode() + b"\n")
    finally:
        os.close(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; none if there is no such file."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # cut short by a kill
            continue
    return found
