"""The requests of vLLM's server that a job makes, with completions that say what was asked for, and with faults.

For what vLLM itself can't be made to do: tests/vllm has the real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from odc_triton import read_policy

BEHIND = "/vllm"  # the server's path, as behind a proxy
LOGPS = [-0.5, None, -1.5]


def completion(prompt: list[int], seed: int, end: int) -> list[int]:
    """The tokens of each completion here, whose parameters begin the end tokens with `end`."""
    return [30 + sum(prompt) % 60, 20 + seed % 250, end]


class Serving:
    """`vllm serve`: its address, what it was asked, the weights that it reads, and `faults`, what it does wrong."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.policy = ""
        self.weights: list[dict[str, torch.Tensor]] = []  # of each update
        self.faults: dict[str, Any] = {}
        self.ended = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # of clients that have left
        self.address = f"http://127.0.0.1:{self.server.server_port}{BEHIND}"

    def stop(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, content: dict) -> Any:
        self.asked.append((path, content))
        if path == "/v1/completions":
            return self._complete(content)
        if path == "/init_weight_transfer_engine":
            self.policy = content["init_info"]["address"]
        if path == "/v1/load_lora_adapter":
            folder = Path(content["lora_path"])
            assert (folder.stat().st_mode & 0o777, (folder / "adapter_config.json").exists()) == (0o700, True)
            self.weights.append(load_file(folder / "adapter_model.safetensors"))
            return b"Success: LoRA adapter added"  # no JSON
        if path == "/update_weights" and not content["update_info"]:
            self.ended.wait(self.faults.get("slow_update_s", 0))
            self.weights.append(dict(read_policy(self.policy)))
        return {
            "/v1/models": {"data": [{"id": "the-policy"}]},
            "/version": {"version": self.faults.get("version", "0.32.1")},
            "/server_info?config_format=json": {
                "vllm_env": {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": True},
                "vllm_config": {
                    "lora_config": self.faults.get("lora"),
                    "weight_transfer_config": self.faults.get("transfer", {"backend": "odc"}),
                    "model_config": {"logprobs_mode": "processed_logprobs"} | self.faults.get("model", {}),
                },
            },
            "/reset_prefix_cache": {"success": "keeps" not in self.faults},
        }.get(path)

    def _complete(self, content: dict) -> dict:
        if content["seed"] != self.faults.get("fast_seed"):
            self.ended.wait(self.faults.get("slow_s", 0))
        choice = {
            "token_ids": completion(content["prompt"], content["seed"], content["stop_token_ids"][0]),
            "logprobs": {"token_logprobs": LOGPS},
            "finish_reason": "stop",
        }
        return {"choices": [choice | self.faults.get("choice", {})] * self.faults.get("choices", 1)}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                path = self.path.removeprefix(BEHIND)
                content = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                faults = serving.faults
                if path == self.path:
                    self.reply(404, b"no such path")
                    return
                if faults.get("refuse") == path:
                    self.reply(500, json.dumps({"error": "the weights do not fit"}).encode())
                    return
                answer = serving.answer(path, content)
                body = answer if isinstance(answer, bytes) else b"" if answer is None else json.dumps(answer).encode()
                if path != "/v1/completions":
                    self.reply(200, body)
                else:
                    self.reply(200, faults.get("body", "").encode() or body, faults.get("missing_bytes", 0))

            do_GET = do_POST

            def reply(self, status: int, body: bytes, missing_bytes: int = 0) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) + missing_bytes))
                drips = missing_bytes and serving.faults.get("drips")
                while drips == "headers" and not serving.ended.wait(0.05):
                    self.send_header("Another", "one")
                    self.flush_headers()
                self.end_headers()
                while drips == "body" and not serving.ended.wait(0.05):
                    self.wfile.write(b" ")
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@contextmanager
def vllm_serve() -> Iterator[Serving]:
    """The server, in threads of this process."""
    serving = Serving()
    threading.Thread(target=serving.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield serving
    finally:
        serving.stop()
