"""Everything that only a GPU can tell, by one command: for a machine with a GPU, without network, in under 9 minutes.

    python -m bench.gpu_suite [--out bench/results] [--stages tests kernels step ...] [--seconds 520]

Stages, in order of worth; each writes FOLDER/gpu_<stage>.json and .md as it ends, so that a run that is cut short keeps
what it has. Each has its share of the time that is left, and what it does not use is the next ones':

    tests     the package, installed into this Python without network, then `pytest -m gpu`: two and more processes on
              one GPU through real symmetric memory (exact contention, the engine against plain torch), kernels against
              references on new random inputs
    lengths   `odc-triton bench --lengths`, where there are two GPUs or more: FSDP2, DDP and ODC over NCCL
    links     bench.links, where there are two GPUs or more: gather, scatter, linear, wgrad between every two
    kernels   bench.run: the kernels' benchmark, with its own checks
    step      minibatches of a model of Qwen2.5-1.5B's shape, random weights, by one and by two ranks on one GPU, with
              own and with replaced layers: where the time goes (`odc-triton profile`)
    killed    one of two processes on one GPU killed while it trains: the other names it, nothing stays behind
    four      four processes on one GPU: exact additions, ten steps of models
    memcheck  compute-sanitizer over every kernel on small shapes, where that tool is present

Exits with 0 if every stage passed, 1 if not, 2 without a GPU. No stage has run on a machine with two GPUs yet.
"""

from .measured import QWEN_1_5B, long_lengths, run_kernels, run_lengths, run_links, run_steps
from .memcheck import run_memcheck
from .outcome import Outcome, write
from .plan import STAGES, Stage, seconds_for, stages_here
from .process import ROOT, install, run
from .tests import FOUR, KILLED, TESTS, read_junit, run_tests

__all__ = [
    "FOUR",
    "KILLED",
    "QWEN_1_5B",
    "ROOT",
    "STAGES",
    "TESTS",
    "Outcome",
    "Stage",
    "install",
    "long_lengths",
    "read_junit",
    "run",
    "run_kernels",
    "run_lengths",
    "run_links",
    "run_memcheck",
    "run_steps",
    "run_tests",
    "seconds_for",
    "stages_here",
    "write",
]
