"""torch's own tests of FSDP2, on a CPU, with on-demand communication: how many hold, and why the others don't.

SOURCE is a source tree of torch 2.6 (its wheel has no tests; Debian: `apt-get source pytorch`). Each test runs with
torch's own FSDP2 first; those that pass there run with the own engine ("ours") or the bridge. Printed are what was
replaced in their text (replacements.py) and per test: passed, with at least as many comparisons; refused, an error; or
different, an assertion that failed or was not reached.
"""

from __future__ import annotations

import argparse
import difflib
import multiprocessing
import os
import re
import sys
import tempfile
import traceback
import types
import unittest
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .replacements import adapt

LIMIT_S = 900
MOST_RANKS = 8
FOLDER = "test/distributed/_composable/fsdp"
LEFT_OUT = ("compile", "logging")  # of torch.compile's graphs, and of what FSDP2 logs in another process
FORK = multiprocessing.get_context("fork")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_fsdp2", description=__doc__)
    parser.add_argument("way", choices=["torch", "ours", "bridge"])
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--only", default="", help="regular expression: tests whose names match")
    parser.add_argument("--log", default=os.devnull, help="what the ranks print")
    args = parser.parse_args()
    paths = [p for p in sorted((args.source / FOLDER).glob("test_*.py")) if not any(w in p.stem for w in LEFT_OUT)]
    if not paths:
        parser.error(f"no tests in {args.source / FOLDER}")
    # torch's helpers import a package for the sake of a base class.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    tally = Counter()
    for path in paths:
        plain, tested = (_load(path, way) for way in ("torch", args.way))
        for case, test in plain:
            name = f"{path.stem.removeprefix('test_fully_shard_')}.{test}"
            if not re.search(args.only, name):
                continue
            verdict, compared, why = _run(plain[case, test], test, args.log)
            if args.way != "torch" and verdict == "passed":
                verdict, ours, why = _run(tested[case, test], test, args.log)
                if verdict == "passed" and ours < compared:
                    verdict, why = "different", f"{ours} comparisons instead of {compared}"
            elif args.way != "torch":
                verdict = "not torch's"
            tally[verdict] += 1
            print(f"{verdict:12} {name} {why}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in tally.most_common()))
    return 0


def _load(path: Path, way: str) -> dict[tuple[str, str], Any]:
    """A file's tests by the names of class and function. Prints what is replaced."""
    from .names import names

    text = path.read_text()
    adapted = adapt(text, way)
    if way != "torch":
        print(
            *difflib.unified_diff(text.splitlines(), adapted.splitlines(), path.name, way, lineterm="", n=0), sep="\n"
        )
    module = types.ModuleType(path.stem)
    module.NAMES = names(way)
    exec(compile(adapted, f"{path} for {way}", "exec"), module.__dict__)
    cases = [case for case in vars(module).values() if isinstance(case, type) and case.__module__ == path.stem]
    return {(case.__name__, test): case(test) for case in cases for test in vars(case) if test.startswith("test_")}


def _run(instance: Any, test: str, log: str) -> tuple[str, int, str]:
    """Verdict, comparisons of all ranks, and the first error of a test."""
    if (world := instance.world_size) > MOST_RANKS:
        return "skipped", 0, f"needs {world} ranks"
    ours, theirs = FORK.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            FORK.Process(target=_rank, args=(theirs, instance, test, n, f"{folder}/store", log)) for n in range(world)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        compared = 0
        try:
            for _ in ranks:
                if not ours.poll(LIMIT_S):
                    return "refused", 0, f"nothing for {LIMIT_S} s"
                verdict, number, why = ours.recv()
                if verdict != "passed":
                    return verdict, 0, why  # the other ranks may wait for this one
                compared += number
        except EOFError:
            return "refused", 0, "a rank's process ended"
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return "passed", compared, ""


def _rank(connection: Connection, instance: Any, test: str, rank: int, store: str, log: str) -> None:
    import torch.distributed as dist

    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    world = instance.world_size
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    instance.rank = rank
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        getattr(instance, test)()
        dist.barrier()
        outcome = ("passed", instance.compared, "")
    except unittest.SkipTest as error:
        outcome = ("skipped", 0, str(error))
    except BaseException as error:
        print(f"==== {test}\n{traceback.format_exc()}", flush=True)
        verdict = "different" if isinstance(error, AssertionError) else "refused"
        outcome = (verdict, 0, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    connection.send(outcome)
    os._exit(0)  # past whatever waits for ranks that failed


if __name__ == "__main__":
    sys.exit(main())
