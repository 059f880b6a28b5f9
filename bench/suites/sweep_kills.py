"""`odc-triton sweep` while it is killed: python -m bench.suites.sweep_kills [--kills 20] [--seed 0] [--out FILE]

Six runs over one base on two ranks, with a checkpoint every two steps. After a random time a rank, or the launcher, is
killed. All must end within 10 s, name the rank, and leave nothing; then `--resume auto` goes on. After a few kills a
sweep may end: all adapters must have the bits of those that nothing disturbed. Else it exits with status 1.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from odc_triton.jobs.reports.report import table

from ..provenance import about, options_of, save_parts
from ..stdlib_corpus import build_corpus, qwen2, write_text

RANKS, LONG_S = 2, 600.0
CONFIG = qwen2(512, 64, 128, 4, 4, 2, 512, False)
MOST_S = 10.0  # from a kill to the end of all processes
KILLS_OF_A_SWEEP = 4
SWEEP = {"token_cap": 256, "truncate": True, "samples_per_rank": 4, "eval_fraction": 0.1, "lora_rank": 4, "steps": 8}
SWEEP |= {"checkpoint_every": 2, "grid": {"lr": [1e-3, 1e-2]}}
SWEEP["runs"] = [{"seed": 1}, {"seed": 2}, {"name": "wide", "lora_rank": 8, "steps": 12}]
RUNS = 6


def prepare(folder: Path) -> None:
    """Writes the text, the base and the sweep's file into `folder`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    write_text(folder, build_corpus()[0], CONFIG, count=200)
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**CONFIG)).save_pretrained(folder / "base")
    files = {"model": "base", "data": "data.jsonl", "tokenizer": "tokenizer.json"}
    given = {name: str(folder / file) for name, file in files.items()} | SWEEP
    (folder / "sweep.yaml").write_text(yaml.safe_dump(given))


def start(folder: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "odc_triton.tools.cli", "sweep", str(folder / "sweep.yaml"), "--out", str(out)]
    command += ["--ranks", str(RANKS), "--resume", "auto"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    """By their numbers; none while they start."""
    found = sorted(psutil.Process(launcher.pid).children(), key=lambda each: (each.create_time(), each.pid))
    return found if len(found) == RANKS else []


def held(processes: list[psutil.Process]) -> set[str]:
    """Names that others could see, of these processes alone: files in /dev/shm, and abstract sockets' addresses."""
    found, sockets = set(), set()
    for each in processes:
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{each.pid}")
            sockets |= {os.readlink(file) for file in (folder / "fd").iterdir()}
            found |= {line.split()[5] for line in (folder / "maps").read_text().splitlines() if "/dev/shm/" in line}
    return found | {address for inode, address in _sockets() if f"socket:[{inode}]" in sockets}


def _sockets() -> list[tuple[str, str]]:
    """Inode and address of each abstract one."""
    lines = map(str.split, Path("/proc/net/unix").read_text().splitlines())
    return [(words[6], words[7]) for words in lines if len(words) > 7 and words[7].startswith("@")]


def left_of(names: set[str]) -> list[str]:
    return sorted(names & {*map(str, Path("/dev/shm").iterdir()), *(address for _, address in _sockets())})


def adapters(out: Path) -> dict[str, bytes]:
    """Of each run, the file's bytes."""
    return {path.parts[-3]: path.read_bytes() for path in sorted(out.glob("*/adapter/adapter_model.safetensors"))}


def strike(folder: Path, out: Path, numbers: random.Random, longest_s: float) -> dict[str, Any] | None:
    """Starts the sweep, kills one of its processes and says what was wrong then; None if it ended before that."""
    launcher, begun_s = start(folder, out), time.monotonic()
    wait_s, who, rank = numbers.uniform(0.0, longest_s), numbers.random(), numbers.randrange(RANKS)
    while launcher.poll() is None and not ranks_of(launcher):
        time.sleep(0.02)
    ranks = ranks_of(launcher) if launcher.poll() is None else []
    while launcher.poll() is None and time.monotonic() - begun_s < wait_s:
        time.sleep(0.02)
    if launcher.poll() is not None:
        launcher.communicate()
        return None
    is_launcher = who < 0.25
    begun = sorted(path.parent.name for path in out.glob("*/metrics.jsonl"))
    every = [first := psutil.Process(launcher.pid), *first.children(recursive=True)]
    victim, names = first if is_launcher else ranks[rank], held(every)
    killed_s = time.monotonic()
    try:
        victim.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:  # the sweep has just ended
        launcher.communicate()
        return None
    text = launcher.communicate(timeout=LONG_S)[1]
    _, alive = psutil.wait_procs(every, timeout=LONG_S)
    ended_s, words = time.monotonic() - killed_s, f"rank {rank} failed first: its process was killed by SIGKILL"
    wrong = []
    if alive or ended_s > MOST_S:
        wrong.append(f"it ended after {ended_s:.1f} s, {len(alive)} processes not at all")
    if not is_launcher and words not in text:
        wrong.append(f"rank {rank} is not named: {text[-1000:]}")
    if left := left_of(names):
        wrong.append(f"{left} stayed")
    return {
        "who": "the launcher" if is_launcher else f"rank {rank}",
        "after_s": killed_s - begun_s,
        "begun": len(begun),
        "names": len(names),
        "ended_s": ended_s,
        "wrong": wrong,
    }


def main() -> int:
    given = options_of(__doc__, kills=20, seed=0)
    os.environ["OMP_NUM_THREADS"] = "1"
    numbers, kills, other = random.Random(given.seed), [], []
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory() as scratch:
        prepare(folder := Path(scratch))
        begun_s = time.monotonic()
        problems = (undisturbed := start(folder, folder / "undisturbed")).communicate(timeout=LONG_S)[1]
        took_s, want = time.monotonic() - begun_s, adapters(folder / "undisturbed")
        if undisturbed.returncode or len(want) != RUNS:
            raise RuntimeError(
                f"the undisturbed sweep has {len(want)} adapters, status {undisturbed.returncode}: {problems}"
            )
        sweeps = 0
        while len(kills) < given.kills:
            out, sweeps = folder / f"killed-{sweeps}", sweeps + 1
            for _ in range(min(KILLS_OF_A_SWEEP, given.kills - len(kills))):
                if (kill := strike(folder, out, numbers, took_s)) is None:
                    break
                kills.append(kill)
                print(kill, flush=True)
            last = start(folder, out)
            problems = last.communicate(timeout=LONG_S)[1]
            got = adapters(out)
            if last.returncode or got != want:
                differ = sorted(name for name in want if got.get(name) != want[name])
                other.append({"differ": differ, "status": last.returncode, "said": problems[-2000:]})
                print(other[-1], flush=True)
    wrong = [kill for kill in kills if kill["wrong"]]
    rows = [
        [kill["who"], f"{kill['after_s']:.1f}", f"{kill['ended_s']:.2f}", "; ".join(kill["wrong"])] for kill in kills
    ]
    print(table(rows, ("killed", "after, s", "all ended, s", "wrong")))
    print(f"{sweeps} sweeps; {len(wrong)} kills ended wrong, {len(other)} sweeps ended with other adapters")
    if given.out is not None:
        found = {"seed": given.seed, "sweeps": sweeps, "kills": kills, "other_adapters": other, "undisturbed_s": took_s}
        save_parts(given.out, kills=found | about())
    return int(bool(wrong or other))


if __name__ == "__main__":
    sys.exit(main())
