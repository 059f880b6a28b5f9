"""The first quarter of an hour on one GPU: is it right, and the numbers that need no second GPU.

    python -m bench.suites.gpu.first FOLDER [--seconds 300] [--only NAME ...] [--rehearse] [--report]

Sections run in one process, in order of what they tell, as each start would cost ten seconds. One that faults, hangs or
loses the GPU's context costs that process, and the next one begins after it. FOLDER/first.jsonl gets a line whenever a
number is known. --report prints it, and what tests have found; it runs nothing. Exits with 1 if something failed.
Nothing has run on a GPU yet.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from ...provenance import ROOT, append_line, read_lines
from .paths import make_importable

LINES, LOG, TESTS = "first.jsonl", "first.log", "tests.jsonl"
_STARTS = 6  # processes: one, and one after each loss
_LEAST_S = 15.0  # with less time left no process is started
_LEAST_SHARE = 0.3  # of a section's seconds
_ERROR_CHARACTERS, _SHOWN_CHARACTERS = 1500, 330


@dataclass(frozen=True, kw_only=True)
class Section:
    """`run`: module and function, which yields lines. `given`: its arguments, with what decides whether it passes,
    which `passes` has in words. `seconds`: it ends after these.
    """

    run: str
    given: Mapping[str, Any] = field(default_factory=dict)
    seconds: float
    passes: str

    def lines(self, gpu: Any) -> Iterator[dict[str, Any]]:
        module, _, name = self.run.rpartition(".")
        run: Callable[..., Iterator[dict[str, Any]]] = getattr(import_module(module, __package__), name)
        return run(gpu, **self.given)


SECTIONS = {
    "rates": Section(run=".parts.rates", seconds=20, passes="torch adds a product of bf16 into fp32 in place"),
    "right": Section(
        run=".parts.right", seconds=50, passes="every operator as near to plain torch as its dtype allows"
    ),
    "group 4096+8x512": Section(
        run=".updates.group",
        given={"prompt": 4096, "completion": 512, "size": 8, "least": 2.5},
        seconds=60,
        passes="gradients within 5%; at least 2.5 times as fast (by FLOPs 3.8 to 4.2)",
    ),
    "rows": Section(
        run=".updates.rows", given={"least": 0.97}, seconds=110, passes="ODC has at least 0.97 of plain torch's speed"
    ),
    "pair 3072+2x512": Section(
        run=".updates.group",
        given={"prompt": 3072, "completion": 512, "size": 2, "of": 4, "least": 1.3},
        seconds=45,
        passes="gradients within 5%; at least 1.3 times as fast (by FLOPs 1.6 to 1.7)",
    ),
    "head": Section(
        run=".parts.head", given={"share": 0.2}, seconds=30, passes="less than 0.2 of the memory that full logits add"
    ),
    "attention": Section(
        run=".parts.attention",
        given={"most": 2e-2},
        seconds=20,
        passes="within 2e-2 of one call, gradients too",
    ),
    "kernels": Section(run=".parts.kernels", seconds=60, passes="every operator as near to plain torch as in `right`"),
    "group 1024+8x1024": Section(
        run=".updates.group",
        given={"prompt": 1024, "completion": 1024, "size": 8},
        seconds=50,
        passes="gradients within 5%",
    ),
    "long": Section(
        run=".updates.long", given={"tokens": 65536}, seconds=60, passes="the loss is the same in chunks and offloaded"
    ),
}


def failed(line: Mapping[str, Any]) -> bool:
    return "error" in line or "lost" in line or line.get("passed") is False or line.get("outcome") == "failed"


def run_sections(folder: Path, names: list[str], until_s: float, *, rehearse: bool) -> None:
    """The child: sections one after another, until `until_s` of the time of day. Ends its process."""
    import torch
    import torch.distributed as dist

    from ...device import Gpu, Rehearsal

    gpu: Gpu = Rehearsal() if rehearse else Gpu()
    if rehearse:
        torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    kinds = "gloo" if rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(kinds, store=dist.HashStore(), rank=0, world_size=1)
    for name in names:
        if not run_section(folder / LINES, name, SECTIONS[name], until_s, gpu):
            os._exit(3)
    os._exit(0)  # a kernel that still runs is not waited for


def run_section(file: Path, name: str, section: Section, until_s: float, gpu: Any) -> bool:
    """Whether the GPU still answers. A section that hangs ends the process after twice its seconds."""

    def say(**line: Any) -> None:
        append_line(file, {"section": name, **line})

    left_s, start_s = until_s - time.time(), time.monotonic()
    if left_s < _LEAST_SHARE * section.seconds:
        say(skipped=f"{left_s:.0f} s left")
        return True
    say(begins=time.time())
    faulthandler.dump_traceback_later(min(2 * section.seconds, max(left_s, 5)), exit=True)
    answers = True
    try:
        for line in section.lines(gpu):
            say(**line)
            if time.monotonic() - start_s > section.seconds:
                say(cut=section.seconds)
                break
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])
    if not gpu.answers():
        say(lost="the GPU's context")
        answers = False
    faulthandler.cancel_dump_traceback_later()
    if answers:
        gpu.forget()
        say(ended=round(time.monotonic() - start_s, 1))
    return answers


def run_children(options: argparse.Namespace, names: list[str]) -> None:
    until_s, file = time.time() + options.seconds, options.folder / LINES
    before = len(read_lines(file))
    module = [sys.executable, "-m", sys.modules["__main__"].__spec__.name, str(options.folder)]
    module += ["--rehearse"] * options.rehearse
    for _ in range(_STARTS):
        left_s = until_s - time.time()
        if not names or left_s < min(_LEAST_S, options.seconds):
            return
        words = ["timeout", "-k", "5", f"{left_s + 5:.0f}", *module, "--until", str(until_s), "--only", *names]
        with (options.folder / LOG).open("a") as log:
            code = subprocess.run(words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        lines = read_lines(file)[before:]
        seen = {line["section"] for line in lines if "begins" in line or "skipped" in line}
        if not seen & {*names}:
            append_line(file, {"section": names[0], "error": f"its process did not begin it: see {LOG}"})
            return
        if not {"ended", "skipped", "lost"} & {*lines[-1]}:
            said = f"the process ended with {code}, by a fault or after twice its seconds: see {LOG}"
            append_line(file, {"section": lines[-1]["section"], "error": said})
        names = [name for name in names if name not in seen]


def report(folder: Path) -> int:
    lines = read_lines(folder / LINES) + read_lines(folder / TESTS)
    for line in lines:
        said = line.get("text", "")[-_SHOWN_CHARACTERS:].replace("\n", " | ")
        shown = str({key: value for key, value in line.items() if key != "text"})[: 2 * _SHOWN_CHARACTERS]
        print(("FAILED " if failed(line) else "") + shown, said)
    count = sum(map(failed, lines))
    print(f"{len(lines)} lines, {count} of them failures")
    return int(count > 0 or not lines)


def main() -> int:
    head, _, more = __doc__.partition("\n\n")
    kind = argparse.RawDescriptionHelpFormatter
    passes = "\n".join(f"{name}: {section.passes}" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(__spec__.name, description=head, epilog=f"{more}\n{passes}", formatter_class=kind)
    parser.add_argument("folder", type=Path, help="gets first.jsonl and first.log")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all together; default: 300")
    parser.add_argument("--only", nargs="+", default=[*SECTIONS], choices=[*SECTIONS], metavar="NAME", help="sections")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, on tiny sizes; measures nothing")
    parser.add_argument("--report", action="store_true", help="print what FOLDER has; run nothing")
    parser.add_argument("--until", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until is not None:
        run_sections(options.folder, options.only, options.until, rehearse=options.rehearse)
    if not options.report:
        options.folder = options.folder.resolve()
        options.folder.mkdir(parents=True, exist_ok=True)
        if options.rehearse:
            os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        with tempfile.TemporaryDirectory() as site:
            make_importable(Path(site))
            run_children(options, options.only)
    return report(options.folder)


if __name__ == "__main__":
    sys.exit(main())
