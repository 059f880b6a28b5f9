"""Decides, before anything imports triton, where kernels run: see bench/kernels/problem.py."""

import gc
import multiprocessing
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

# Some virtual machines announce AMX and can't run it: a product in bf16 then ends the process by SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# As the Makefile does: ranks have one thread, and some tests compare their bits with this process's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from bench.suites.hosts_net import NO_NAMESPACES

pytest.register_assert_rewrite("tests.support")
from tests.support import place as place  # noqa: E402
from tests.support import ranks  # noqa: E402
from tests.support import simulated as simulated  # noqa: E402

# Loaders' workers too: a lock that a thread of a rank held at a fork would stay locked in the worker.
multiprocessing.set_start_method("forkserver")
ranks.fork_server()  # before a library starts the server, without what ranks need

# A property test draws the same examples in every run, so a first run on a new machine fails only where the last one
# here did. `python -m tests.search` draws others.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("ODC_TEST_EXAMPLES", "fixed"))

os.environ["ODC_TUNED"] = "off"  # what the tests measure must not depend on what was tuned here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-tables", metavar="FOLDER", help="write tables that tests made into the folder's pages")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--write-tables"):
        from tests.support.tables import TableWriter
        from tests.tables import TABLES

        config.pluginmanager.register(TableWriter(Path(folder), TABLES))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # modules and tests are there to the end: collections, of which some tests make many, leave them alone


@pytest.fixture(autouse=True)
def _own_random_numbers(request: pytest.FixtureRequest) -> None:
    """A test's numbers come from its name, not from what ran before it: a failure comes again, alone too.

    ODC_TEST_SEED=2 draws others: a tolerance has to hold for any.
    """
    torch.manual_seed(zlib.crc32(f"{os.environ.get('ODC_TEST_SEED', '')}{request.node.nodeid}".encode()))


@pytest.fixture(autouse=True)
def _no_process_group_stays() -> Iterator[None]:
    """A test that shards a model in this process makes a world of one, as a notebook does."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if left_out := sum(NO_NAMESPACES in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{NO_NAMESPACES}: {left_out} tests in network namespaces were left out")
