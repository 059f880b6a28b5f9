"""A quarter of an hour on one GPU: is it right, and the numbers that need no second GPU.

    python -m bench.suites.gpu --seconds 420 --out out/gpu
    python -m bench.suites.gpu --seconds 230 --out out/second --only tests "all tests" --tests THOSE THAT FAILED

Sections run in order of what they tell, in one process, as each start would cost ten seconds; those of several ranks
start their own. One that faults, hangs or loses the GPU's context costs that process, and the next one begins after it.
gpu.jsonl in the folder gets a line whenever a number is known, so a kill loses nothing; gpu.log has what was printed.
Exits with 1 if something failed or nothing passed, 2 without a GPU. docs/gpus.md has more. What passes:
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...provenance import RESULTS, ROOT, about, append_line, read_lines
from .plan import LINES, LISTS, LOG, Section

_STARTS = 6  # processes: one, and one after each loss
_LEAST_S = 15.0  # with less time left no process is started
_MARGIN_S = 10.0  # of a section that ends with all, for its last lines
_LEAST_SHARE = 0.2  # of a section's seconds
_NO_GPU = 2
_ERROR_CHARACTERS, _SHOWN_CHARACTERS = 1500, 330
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
_REHEARSED = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def make_importable(site: Path) -> None:
    """Finds the packages of this checkout, by links in `site`: in this process and in those that it starts."""
    for name, folder in (("odc_kernels", "kernels"), ("odc_bench", "bench"), ("odc_triton", "odc_triton")):
        (site / name).symlink_to(ROOT / folder)
    sys.path[:0] = found = [str(site), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH", "")]))


def failed(line: Mapping[str, Any]) -> bool:
    return "error" in line or "lost" in line or line.get("passed") is False or line.get("outcome") == "failed"


def run_sections(folder: Path, sections: Mapping[str, Section], until_s: float, *, rehearse: bool) -> int:
    """The child: sections one after another, until `until_s` of the time of day. Returns its exit status."""
    import torch
    import torch.distributed as dist

    from odc_triton.jobs.launcher.launch import die_with_parent

    from ...device import Gpu, Rehearsal

    die_with_parent()
    gpu: Gpu = Rehearsal() if rehearse else Gpu()
    if rehearse:
        torch.set_num_threads(1)
    if not gpu.count():
        return _NO_GPU
    append_line(folder / LINES, {"section": "", "rehearsal": rehearse, "gpu": gpu.about(), **about()})
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    kinds = "gloo" if rehearse else "cpu:gloo,cuda:nccl"
    dist.init_process_group(kinds, store=dist.HashStore(), rank=0, world_size=1)
    for name, section in sections.items():
        if not run_section(folder, name, section, until_s, gpu):
            os._exit(3)
    dist.destroy_process_group()
    return 0


def run_section(folder: Path, name: str, section: Section, until_s: float, gpu: Any) -> bool:
    """Whether the GPU still answers. A section is cut at its seconds, or where all together end; one that hangs ends
    the process after twice its seconds, or a little later than all together.
    """

    def say(**line: Any) -> None:
        append_line(folder / LINES, {"section": name, **line})

    left_s, start_s, passed, wrong = until_s - time.time(), time.monotonic(), 0, False
    lacks = f"{max(left_s, 0):.0f} s left" if left_s < _LEAST_SHARE * section.seconds else ""
    if gpu.count() < section.gpus:
        lacks = f"it needs {section.gpus} GPUs"
    if lacks:
        say(skipped=lacks)
        return True
    say(begins=time.time())
    faulthandler.dump_traceback_later(min(2 * section.seconds, max(left_s, 0) + _MARGIN_S), exit=True)
    cut = {}
    try:
        for line in section.lines(gpu, folder, max(left_s - _MARGIN_S, _MARGIN_S)):
            say(**line)
            passed, wrong = passed + (line.get("passed") is True), wrong or failed(line)
            if time.monotonic() - start_s > min(section.seconds, left_s):
                cut = {"cut": True}
                break
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])
        wrong = True
    answers = gpu.answers()
    faulthandler.cancel_dump_traceback_later()
    if not answers:
        say(lost="the GPU's context")
    else:
        gpu.forget()
        all_said = passed >= section.least if section.least else passed and not cut
        verdict = "failed" if wrong else "passed" if all_said else "none"
        say(ended=round(time.monotonic() - start_s, 1), **cut, verdict=verdict)
    return answers


def run_children(words: list[str], names: list[str], folder: Path, seconds: float) -> int:
    """Runs `words` with the names that are left, again after each that is lost. Returns the last one's status."""
    until_s, file, code = time.time() + seconds, folder / LINES, 0
    before = len(read_lines(file))
    for _ in range(_STARTS):
        left_s = until_s - time.time()
        if not names or left_s < min(_LEAST_S, seconds / 2):
            break
        child = [*words, "--until", str(until_s), "--only", *names]
        with (folder / LOG).open("a") as log, contextlib.suppress(subprocess.TimeoutExpired):
            code = -signal.SIGKILL  # after its time
            code = subprocess.run(child, cwd=ROOT, stdout=log, stderr=log, timeout=left_s + 2 * _MARGIN_S).returncode
        lines = read_lines(file)[before:]
        seen = {line["section"] for line in lines if "begins" in line or "skipped" in line}
        if code == _NO_GPU and not seen:
            break
        if not seen & {*names}:
            said = "the GPU is gone" if code == _NO_GPU else f"its process did not begin it: see {LOG}"
            append_line(file, {"section": names[0], "error": said})
            names, code = names[1:], 1
            continue
        (*_, last) = [line["section"] for line in lines if "begins" in line] or [None]
        if last and not any(line["section"] == last and {"ended", "lost"} & {*line} for line in lines):
            said = f"the process ended with {code}, by a fault or after twice its seconds: see {LOG}"
            append_line(file, {"section": last, "error": said})
        names = [name for name in names if name not in seen]
    for name in names if code != _NO_GPU or len(read_lines(file)) > before else ():
        append_line(file, {"section": name, "skipped": "no time left, or too many processes lost"})
    return code


def report(folder: Path, after: int = 0) -> int:
    """Prints the lines after so many, those of earlier runs. Returns the exit status."""
    lines = read_lines(folder / LINES)[after:]
    for line in lines:
        said = line.get("text", "")[-_SHOWN_CHARACTERS:].replace("\n", " | ")
        shown = str({key: value for key, value in line.items() if key != "text"})[: 2 * _SHOWN_CHARACTERS]
        print(("FAILED " if failed(line) else "") + shown, said)
    verdicts: dict[str, str] = {}  # of each section's last run
    for line in lines:
        name, said = line["section"], line.get("verdict")
        if "begins" in line or "skipped" in line:
            verdicts[name] = "skipped" if "skipped" in line else "no verdict"
        if failed(line) or said in ("passed", "failed"):
            verdicts[name] = "failed" if failed(line) else said
    print("".join(f"{verdict:>12}  {name}\n" for name, verdict in verdicts.items()), end="")
    print(f"{len(lines)} lines, {sum(map(failed, lines))} of them failures")
    return int("failed" in verdicts.values() or "passed" not in verdicts.values())


def parsed(words: list[str] | None, sections: Mapping[str, Section]) -> argparse.Namespace:
    head, _, more = __doc__.partition("\n\n")
    more += "\n".join(f"    {name}: {section.passes}" for name, section in sections.items())
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.suites.gpu", description=head, epilog=more, formatter_class=kind)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "gpu", help="folder of the results; default: out/gpu"
    )
    parser.add_argument("--seconds", type=float, default=420.0, help="for all together; default: 420")
    parser.add_argument("--list", choices=LISTS, default="quarter", help="of sections; default: quarter")
    parser.add_argument("--only", nargs="+", choices=sections, metavar="NAME", help="sections, of either list")
    parser.add_argument("--tests", nargs="+", metavar="ID", help="other tests for the section `tests`")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, on tiny sizes; measures nothing")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--each", type=float, help=argparse.SUPPRESS)  # seconds of a section, whatever it has
    options = parser.parse_args(words)
    options.out = options.out.resolve()
    if options.tests and "tests" not in (options.only or LISTS[options.list]):
        parser.error("--tests are for the section `tests`, which is not chosen")
    if not options.seconds > 0:
        parser.error(f"--seconds is {options.seconds}; give more than 0")
    if options.rehearse and options.out.is_relative_to(RESULTS):
        parser.error(f"a rehearsal measures nothing: {options.out} is in {RESULTS}, choose another folder")
    return options


def main(words: list[str] | None = None) -> int:
    sections = {name: section for of in LISTS.values() for name, section in of.items()}
    options = parsed(words, sections)
    names, given = options.only or [*LISTS[options.list]], ["--rehearse"] * options.rehearse
    if options.tests:
        more = {"tests": options.tests, "least": len(options.tests)}
        sections["tests"] = replace(sections["tests"], given={**sections["tests"].given, **more})
        given += ["--tests", *options.tests]
    if options.until is not None:
        chosen = {name: replace(sections[name], seconds=options.each or sections[name].seconds) for name in names}
        return run_sections(options.out, chosen, options.until, rehearse=options.rehearse)
    if options.report:
        return report(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    before = len(read_lines(options.out / LINES))
    os.environ |= _ENVIRONMENT | {"OMP_NUM_THREADS": "4"} | (_REHEARSED if options.rehearse else {})
    module = [sys.executable, "-m", sys.modules["__main__"].__spec__.name, "--out", str(options.out), *given]
    with tempfile.TemporaryDirectory() as site:
        make_importable(Path(site))
        code = run_children(module, names, options.out, options.seconds)
    if code == _NO_GPU:
        print("there is no GPU here: nothing was run; --rehearse tries this command without one", file=sys.stderr)
        return _NO_GPU
    return report(options.out, before)


if __name__ == "__main__":
    sys.exit(main())
