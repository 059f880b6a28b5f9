"""`vllm serve`, as documented, over the stand-in of vLLM's library beside this file; and what can go wrong with it."""

from __future__ import annotations

import importlib
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

FOLDER = str(Path(__file__).parent)


class Serving:
    """The server: its address and model, what it was asked, and `faults`, what it does wrong."""

    def __init__(self, vllm: Any, folder: Path) -> None:
        self.vllm, self.llm = vllm, vllm.LLM(str(folder))
        self.asked: list[str] = []
        self.completions: list[dict] = []
        self.received: list[str] = []
        self.updating = False
        self.faults: dict[str, Any] = {}
        self.trainer: socket.socket | None = None
        self.ended = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # of clients that have left
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.ended.set()
        if self.trainer is not None:
            self.trainer.close()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, content: dict) -> Any:
        self.asked.append(path)
        return {
            "/health": lambda: None,
            "/v1/models": lambda: {"data": [{"id": "the-policy"}]},
            "/server_info?config_format=json": self.info,
            "/get_world_size": lambda: {"world_size": 1},
            "/init_weight_transfer_engine": lambda: self.connect(**content["init_info"]),
            "/start_weight_update": lambda: self.update(True),
            "/update_weights": lambda: self.receive(**content["update_info"]),
            "/finish_weight_update": lambda: self.update(False),
            "/reset_prefix_cache": lambda: {"success": self.llm.reset_prefix_cache() and "keeps" not in self.faults},
            "/v1/completions": lambda: self.complete(content),
        }[path]()

    def info(self) -> dict:
        mode = self.faults.get("mode", "processed_logprobs")
        transfer = self.faults.get("transfer", {"backend": "nccl"})
        return {"vllm_config": {"weight_transfer_config": transfer, "model_config": {"logprobs_mode": mode}}}

    def connect(self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, **_: Any) -> dict:
        assert (rank_offset, world_size) == (1, 2)
        while self.trainer is None and not self.ended.is_set():
            try:
                self.trainer = socket.create_connection((master_address, master_port))
            except ConnectionRefusedError:
                time.sleep(0.01)
        return {"message": "ok"}

    def update(self, begins: bool) -> dict:
        assert self.updating is not begins
        self.updating = begins
        return {"message": "ok"}

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> dict:
        assert self.updating
        self.ended.wait(self.faults.get("slow_update_s", 0))
        self.received = names
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            kind = getattr(torch, dtype)
            data = bytearray(math.prod(shape) * kind.itemsize)
            got = 0
            while got < len(data):
                count = self.trainer.recv_into(memoryview(data)[got:])
                assert count, "the trainer is gone"
                got += count
            self.llm.model.load_weights([(name, torch.frombuffer(data, dtype=kind).view(shape))])
        return {"message": "ok"}

    def complete(self, content: dict) -> Any:
        if content["seed"] != self.faults.get("fast_seed"):
            self.ended.wait(self.faults.get("slow_s", 0))
        assert content.pop("return_token_ids") is True
        assert content.pop("model") == "the-policy"
        prompt = content.pop("prompt")
        self.completions.append(content)
        asked = self.vllm.SamplingParams(**content)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], [asked], use_tqdm=False)
        (one,) = output.outputs
        logps = [each[token].logprob for token, each in zip(one.token_ids, one.logprobs, strict=True)]
        choice = {"token_ids": one.token_ids, "logprobs": {"token_logprobs": logps}, "finish_reason": one.finish_reason}
        return {"choices": [choice | self.faults.get("choice", {})] * self.faults.get("choices", 1)}

    def handler(self) -> type[BaseHTTPRequestHandler]:
        serving = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                faults = serving.faults
                if faults.get("refuse") == self.path:
                    self.reply(500, json.dumps({"error": "the weights do not fit"}).encode())
                    return
                answer = serving.answer(self.path, content)
                body = b"" if answer is None else json.dumps(answer).encode()
                if self.path != "/v1/completions":
                    self.reply(200, body)
                elif faults.get("breaks_off"):
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.reply(200, faults.get("body", "").encode() or body, faults.get("missing_bytes", 0))

            do_GET = do_POST

            def reply(self, status: int, body: bytes, missing_bytes: int = 0) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body) + missing_bytes))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@contextmanager
def stand_in() -> Iterator[Any]:
    """The stand-in of vLLM's library, importable by that name in this block."""
    sys.path.insert(0, FOLDER)
    try:
        yield importlib.import_module("vllm")
    finally:
        sys.path.remove(FOLDER)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


@contextmanager
def vllm_serve(folder: Path) -> Iterator[Serving]:
    """The server, in threads of this process."""
    with stand_in() as vllm:
        serving = Serving(vllm, folder)
    threading.Thread(target=serving.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield serving
    finally:
        serving.stop()
