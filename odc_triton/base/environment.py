"""What a process finds: environment variables, those of a rank that another program started, versions of packages."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version


def joined_world() -> int | None:
    """The number of ranks of the job that torchrun, or the like, started this process for; None: it is no rank.

    Raises ValueError for variables that contradict each other.
    """
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None or (world == "1" and "TORCHELASTIC_RUN_ID" not in os.environ):
        return None
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)) or "MASTER_ADDR" not in os.environ:
        raise ValueError(
            f"RANK is {rank!r}, WORLD_SIZE {world!r} and MASTER_ADDR {os.environ.get('MASTER_ADDR')!r}: start this by "
            f"torchrun, which sets them, or unset RANK and WORLD_SIZE"
        )
    return int(world)


def require_world(ranks: int | None, world: int) -> None:
    """Raises ValueError for a number of ranks that is not that of the world."""
    if ranks not in (None, world):
        raise ValueError(
            f"--ranks is {ranks}, and this process is one of {world} ranks, as torchrun's RANK and WORLD_SIZE say: "
            f"leave --ranks out, or unset RANK and WORLD_SIZE"
        )


@contextmanager
def environment(**wanted: str) -> Iterator[None]:
    """Sets these variables, and puts back what they were."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def installed(*packages: str) -> dict[str, str]:
    """The packages' versions, or "not installed"."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def needs_transformers(oldest: str) -> str:
    """If an older one is installed, "needs transformers 5.17, and 5.6.0 is installed", for an error; else nothing."""
    found = version("transformers")
    is_older = Version(found).release < Version(oldest).release
    return f"needs transformers {oldest}, and {found} is installed" if is_older else ""


def quiet_bitsandbytes() -> None:
    """Call it before bitsandbytes is imported, which PEFT does too. It then does not log, on some CPUs, that a package
    with one of its kernels is not installed; it has another.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    return not record.msg.startswith("Failed to load CPU gemm_4bit_forward")
