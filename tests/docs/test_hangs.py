"""The pages that people find by what hangs: their program hangs under FSDP2, and ends by on-demand communication."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S

ROOT = Path(__file__).parents[2]
_TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
_HANGS_S = 20.0  # what ends takes less than ten


def _ended(*words: str, within_s: float) -> str | None:
    """What a job printed; None if it had not ended."""
    command = [*_TORCHRUN, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True, "env": environment}
    with subprocess.Popen(command, **options) as job:
        try:
            said, _ = job.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            said = None
        else:
            assert job.returncode == 0, said
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return said


@pytest.mark.parametrize("name", ["batches", "images", "generation"])
def test_a_page_shows_its_program(name: str) -> None:
    page, program = ROOT / "docs" / f"hang_{name}.md", ROOT / "examples" / "hangs" / f"{name}.py"
    assert program.read_text().partition('"""\n\n')[2] in page.read_text()
    assert page.read_text().count(f"examples/hangs/{name}.py") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batches", "images", "generation"])
def test_it_hangs_and_ends(name: str) -> None:
    program = str(ROOT / "examples" / "hangs" / f"{name}.py")
    said = _ended("-m", "odc_triton.run", "--strict", program, within_s=LONG_S)
    norms = re.findall(r"gradient norm (\d+\.\d+)", said or "")
    assert len(norms) in (2, 4), said
    assert len(set(norms)) == len(norms) // 2, said  # both ranks have the same in each step
    assert _ended(program, within_s=_HANGS_S) is None
