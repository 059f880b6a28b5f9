"""What may make everything else on a machine fail, found in a minute: one short program a check."""

from __future__ import annotations

import sys
import tempfile
import time

from .ledger import Ledger
from .process import run
from .tests import tail

# torch binds TMPDIR/symm_mem-PID, and the kernel takes 107 characters of it.
_SOCKET_CHARACTERS = 107 - len("/symm_mem-") - 7

# A fork server has imported all of this when it forks a test's ranks: if a library had initialised CUDA, no rank could.
_FORK = """
import os
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as tests/support/ranks.py sets it
import tests.support.preload, tests.support.models, torch
child = os.fork()
if not child:
    {touch}
    print("the child of a fork reaches its device", flush=True)
    os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1] != 0)
"""
# bench.run's best baseline for weight gradients, in torch since November 2025.
_ADDMM = """
import torch
a, b = torch.randn(64, 32, device="cuda").bfloat16(), torch.randn(32, 16, device="cuda").bfloat16()
out = torch.ones(64, 16, device="cuda")
torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
torch.testing.assert_close(out, 1 + a.float() @ b.float(), rtol=1e-3, atol=1e-3)
print(torch.__version__, "adds a product of bf16 to fp32")
"""


def run_checks(ledger: Ledger, environment: dict[str, str], *, rehearse: bool, deadline_s: float) -> bool:
    """Whether all passed; each is written down as it ends."""
    length = len(tempfile.gettempdir())
    folder = f"{tempfile.gettempdir()} has {length} characters, {_SOCKET_CHARACTERS} are allowed"
    results = [_write(ledger, "TMPDIR", length <= _SOCKET_CHARACTERS, folder, 0.0)]
    touch = "torch.zeros(1)" if rehearse else 'torch.cuda.init(); torch.zeros(1, device="cuda")'
    programs = {"fork": _FORK.format(touch=touch)}
    programs["addmm"] = "print('only a GPU has that product')" if rehearse else _ADDMM
    for name, program in programs.items():
        begin_s = time.monotonic()
        code, text = run([sys.executable, "-c", program], environment, max(deadline_s - begin_s, 1))
        said = tail(text) if code is not None else "the time ran out"
        results.append(_write(ledger, name, code == 0, said, time.monotonic() - begin_s))
    return all(results)


def _write(ledger: Ledger, name: str, passed: bool, text: str, seconds: float) -> bool:
    ledger.add("run", stage="checks", name=name, passed=passed, seconds=round(seconds, 1), data={"text": text})
    return passed
