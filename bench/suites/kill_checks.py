"""What kills.py and soak.py want of a run that was disturbed, from its status, its words, its files and /proc."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path

import psutil

KILL, LAUNCHER, TERM, CTRL_C, FREEZE = "a rank", "the launcher", "SIGTERM", "Ctrl-C", "a frozen rank"
STOPS = {TERM: signal.SIGTERM, CTRL_C: signal.SIGINT}
COMPARED = 12  # steps: later ones may differ by more than rounding, as a token that is sampled another way
Lines = dict[str, list[str]]


def metrics_lines(out: Path) -> Lines:
    """Of each run in `out`, its whole lines."""
    files = {str(path.relative_to(out)): path.read_text() for path in sorted(out.rglob("metrics.jsonl"))}
    return {name: text[: text.rfind("\n") + 1].splitlines() for name, text in files.items()}


def models(out: Path, *, with_bits: bool) -> dict[str, bytes]:
    """Of each file of weights that a run ends with, what is in it."""
    found = {str(path.relative_to(out)): path for path in out.rglob("*.safetensors") if "checkpoints" not in path.parts}
    return {name: path.read_bytes() if with_bits else b"" for name, path in found.items()}


def differences(got: Path, want: Path, *, with_bits: bool) -> list[str]:
    """Between a run that was disturbed and one that was not: each has its steps once, and these weights."""
    lines, wanted = metrics_lines(got), metrics_lines(want)
    found = {name: [json.loads(line) for line in of] for name, of in lines.items()}
    expected = {name: [json.loads(line) for line in of] for name, of in wanted.items()}
    steps = {name: [line["step"] for line in of] for name, of in found.items()}
    wrong = []
    if not expected or any([line["step"] for line in of] != [*range(1, len(of) + 1)] for of in expected.values()):
        wrong.append("the undisturbed run has not each of its steps once")
    if steps != {name: [line["step"] for line in of] for name, of in expected.items()}:
        return [*wrong, f"it has the steps {steps}"]
    if not with_bits:  # the order of sums is free
        for name, of in found.items():
            pairs = zip(of[:COMPARED], expected[name][:COMPARED], strict=True)
            wrong += [f"another {key} in step {a['step']}" for a, b in pairs for key in ("loss", "grad_norm")
                      if not math.isclose(a[key], b[key], rel_tol=1e-3, abs_tol=1e-5)]  # fmt: skip
    weights, wanted_weights = models(got, with_bits=with_bits), models(want, with_bits=with_bits)
    names = sorted(n for n in weights | wanted_weights if weights.get(n) != wanted_weights.get(n))
    return wrong + ([f"other models: {names}"] if names or not weights else [])


def lost_lines(before: Lines, after: Lines, *, interval: int) -> list[str]:
    """Steps that a run took again though a checkpoint had them: their lines were written anew. `interval`: of steps,
    how far behind its checkpoint may be.
    """
    wrong = []
    for name, lines in before.items():
        kept = sum(a == b for a, b in zip(lines, after.get(name, []), strict=False))
        if kept < (least := len(lines) - interval):
            wrong.append(f"{name}: it had {len(lines)} steps, and went on after {kept}, not {least} or more")
    return wrong


def is_right_end(how: str, rank: int, status: int | None, said: str, *, is_ours: bool, is_done: bool) -> bool:
    """The status is that of such a strike, and the last error names the rank that was killed or is waited for.

    `is_ours`: the launcher is, not torchrun. `is_done`: all steps were taken as it was struck.
    """
    last = said.rpartition("odc-triton: ")[2]
    if status in (0, None):
        return status == 0 and is_done
    if how == KILL and is_ours:
        return last.startswith(f"rank {rank} failed first: its process was killed by SIGKILL")
    if how == KILL:
        ended = rf"\(exitcode: -9\) local_rank: {rank} |\brank\s*: {rank} \(local_rank: \d+\)\n\s*exitcode\s*: -9 "
        return re.search(ended, said) is not None
    if how == FREEZE:
        waits = rf"\bfor ranks? \[?{rank}\]?(?![\d,])|\bits lock is held by rank {rank}\b"
        return re.search(rf"{waits}|^rank {rank} failed first: its process is stopped", last) is not None
    number = STOPS.get(how, signal.SIGKILL)
    return status in (128 + number, -number, *(() if is_ours else (1,)))


def own_processes(launcher: int, scratch: Path) -> list[psutil.Process]:
    """Those of a run: in the launcher's session, or begun with `scratch` as their folder of temporary files."""
    found, mark = [], f"TMPDIR={scratch}".encode()
    for each in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            own = os.getsid(each.pid) == launcher or mark in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0")
            if own and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def held(processes: Iterable[psutil.Process]) -> set[str]:
    """Names that others could see, of these processes alone: files in /dev/shm, and abstract sockets' addresses."""
    found, opened = set(), set()
    for each in processes:
        folder = Path(f"/proc/{each.pid}")
        with contextlib.suppress(OSError):
            for file in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    opened.add(os.readlink(file))
        with contextlib.suppress(OSError):
            found |= {line.split()[5] for line in (folder / "maps").read_text().splitlines() if "/dev/shm/" in line}
    found |= {name for name in opened if name.startswith("/dev/shm/")}
    return found | {address for inode, address in _sockets() if f"socket:[{inode}]" in opened}


def left_of(names: set[str]) -> list[str]:
    return sorted(names & {*map(str, Path("/dev/shm").iterdir()), *(address for _, address in _sockets())})


def _sockets() -> list[tuple[str, str]]:
    """Inode and address of each abstract one."""
    lines = map(str.split, Path("/proc/net/unix").read_text().splitlines())
    return [(words[6], words[7]) for words in lines if len(words) > 7 and words[7].startswith("@")]
