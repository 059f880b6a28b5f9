"""`vllm serve`, as documented, over the stand-in of vLLM's library beside this file; and what can go wrong with it."""

from __future__ import annotations

import json
import math
import multiprocessing
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FOLDER = str(Path(__file__).parent)


class _Refused(Exception):
    pass


class _Serving:
    """The state of the server: its model, what it was asked, and its `faults`."""

    def __init__(self, folder: str) -> None:
        import vllm

        self.llm = vllm.LLM(folder)
        self.asked: list[str] = []
        self.completions: list[dict] = []
        self.received: list[str] = []
        self.updating = False
        self.faults: dict[str, Any] = {}
        self.trainer: socket.socket | None = None

    def answer(self, path: str, content: dict) -> Any:
        self.asked.append(path)
        if self.faults.get("refuse") == path:
            raise _Refused("the weights do not fit")
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
            "/faults": lambda: self.faults.update(content) or {},
            "/recorded": self.recorded,
        }[path]()

    def info(self) -> dict:
        mode = self.faults.get("mode", "processed_logprobs")
        transfer = self.faults.get("transfer", {"backend": "nccl"})
        return {"vllm_config": {"weight_transfer_config": transfer, "model_config": {"logprobs_mode": mode}}}

    def connect(self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, **_: Any) -> dict:
        assert (rank_offset, world_size) == (1, 2)
        deadline = time.monotonic() + 10
        while self.trainer is None:
            try:
                self.trainer = socket.create_connection((master_address, master_port))
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return {"message": "ok"}

    def update(self, begins: bool) -> dict:
        assert self.updating is not begins
        self.updating = begins
        return {"message": "ok"}

    def receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> dict:
        assert self.updating
        time.sleep(self.faults.get("slow_update_s", 0))
        self.received = names
        for name, dtype, shape in zip(names, dtype_names, shapes, strict=True):
            kind = getattr(torch, dtype)
            data = bytearray()
            size = math.prod(shape) * kind.itemsize
            while len(data) < size:
                part = self.trainer.recv(size - len(data))
                assert part
                data += part
            self.llm.model.load_weights([(name, torch.frombuffer(data, dtype=kind).view(shape))])
        return {"message": "ok"}

    def complete(self, content: dict) -> Any:
        from vllm import SamplingParams

        if content["seed"] != self.faults.get("fast_seed"):
            time.sleep(self.faults.get("slow_s", 0))
        assert content.pop("return_token_ids") is True
        assert content.pop("model") == "the-policy"
        prompt = content.pop("prompt")
        self.completions.append(content)
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], [SamplingParams(**content)], use_tqdm=False)
        (one,) = output.outputs
        logps = [each[token].logprob for token, each in zip(one.token_ids, one.logprobs, strict=True)]
        choice = {"token_ids": one.token_ids, "logprobs": {"token_logprobs": logps}, "finish_reason": one.finish_reason}
        return {"choices": [choice | self.faults.get("choice", {})] * self.faults.get("choices", 1)}

    def recorded(self) -> dict:
        return {"asked": self.asked, "received": self.received, "completions": self.completions}


def _serve(connection: Any, folder: str) -> None:
    sys.path.insert(0, FOLDER)
    torch.set_num_threads(1)
    serving = _Serving(folder)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status = 200
            try:
                content = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                answer = serving.answer(self.path, content)
            except _Refused as refusal:
                status, answer = 500, {"error": str(refusal)}
            body, missing_bytes = b"" if answer is None else json.dumps(answer).encode(), 0
            if self.path == "/v1/completions":
                body = serving.faults.get("body", "").encode() or body
                missing_bytes = serving.faults.get("missing_bytes", 0)
                if serving.faults.get("breaks_off"):
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + missing_bytes))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    connection.send(server.server_port)
    server.serve_forever()


@contextmanager
def vllm_serve(folder: Path) -> Iterator[SimpleNamespace]:
    """The server in a process of its own; `.address`, and `.kill()`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload", "tests.support.models"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, str(folder)), daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(120)
        yield SimpleNamespace(address=f"http://127.0.0.1:{receiver.recv()}", kill=process.kill)
    finally:
        process.kill()
        process.join()
        receiver.close()
