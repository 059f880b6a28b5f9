"""vLLM itself for tests: a model that it takes, and its server. Tests are skipped where it is not installed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from odc_triton.jobs.data.tokenizer import load_tokenizer, to_transformers
from tests.support.deadlines import LONG_S
from tests.support.grpo_case import write_prompts

# Of CPUs, small, and without the network.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
HEADS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}  # of 32


def require_vllm() -> None:
    """Skips a file of tests where vLLM is not installed."""
    pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")


def write_vllm_case(folder: Path, **config: Any) -> Path:
    """`write_prompts` with a model whose heads vLLM has on CPUs. start/ has its tokenizer too, and a generation config
    that would cut the distribution if the engines did not say otherwise.
    """
    write_prompts(folder, config=HEADS | config)
    to_transformers(load_tokenizer(folder / "tokenizer.json")).save_pretrained(folder / "start")
    cuts = {"do_sample": True, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": 7}
    (folder / "start" / "generation_config.json").write_text(json.dumps(cuts))
    return folder


class RealServer:
    """`address`, the process, and `log`, a file."""

    def __init__(self, process: subprocess.Popen, address: str, log: Path) -> None:
        self.process, self.address, self.log = process, address, log
        self.shared: set[Path] = set()

    def signal(self, which: signal.Signals) -> None:
        """To the server and its workers."""
        os.killpg(self.process.pid, which)


@contextlib.contextmanager
def vllm_serve(folder: Path, log: Path, *more: str, **environment: str) -> Iterator[RealServer]:
    """`vllm serve folder`, in fp32 unless `more` has other options, on a free port; killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # `vllm serve` itself asks for the version of a package vllm, which is vllm-cpu here.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "32"]
    command += ["--dtype", "float32", "--logprobs-mode", "processed_logprobs"]
    command += ["--weight-transfer-config", '{"backend": "odc"}', *more]
    ours = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", **ENVIRONMENT, **environment}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=os.environ | ours, stdout=output, stderr=output, start_new_session=True)
    server = RealServer(process, f"http://127.0.0.1:{port}", log)
    try:
        deadline_s = time.monotonic() + LONG_S
        while not _is_healthy(server.address):
            ended = process.poll() is not None or time.monotonic() > deadline_s
            assert not ended, f"vllm serve did not start: {log.read_text()[-3000:]}"
            time.sleep(0.2)
        server.shared = _shared_memory(process.pid)
        yield server
    finally:
        shared = _shared_memory(process.pid)
        with contextlib.suppress(ProcessLookupError):
            server.signal(signal.SIGKILL)
        process.wait()
        for path in server.shared | shared:  # vLLM removes it only if it is not killed
            path.unlink(missing_ok=True)


def _shared_memory(pid: int) -> set[Path]:
    """What the process and its children have mapped of /dev/shm."""
    import psutil

    found = set()
    with contextlib.suppress(psutil.Error, OSError):
        for each in [parent := psutil.Process(pid), *parent.children(recursive=True)]:
            maps = Path(f"/proc/{each.pid}/maps").read_text()
            found |= {Path(line.split()[5]) for line in maps.splitlines() if "/dev/shm/" in line}
    return found


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
