"""What odc_triton.rl uses of vLLM, the server and the library, with completions that say what was asked for."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

LOGPS = [-0.5, None, -1.5]


def completion(prompt: list[int], seed: int, end: int) -> list[int]:
    """The tokens of each completion here, whose parameters begin the end tokens with `end`."""
    return [30 + sum(prompt) % 60, 20 + seed % 250, end]


class _Trainer:
    """The trainer's side of weight transfer, which keeps what it would send."""

    def __init__(self, init_info: Any, client: Any, source: Any) -> None:
        assert (init_info.rank, init_info.world_size) == (0, 2)
        assert init_info.master_address == "127.0.0.1"
        self.client, self.source, self.is_open = client, source, True
        self.sent: dict[str, torch.Tensor] = {}
        self._asks(client.init_weight_transfer_engine, {"master_port": init_info.master_port})

    def send_weights(self) -> None:
        declared = [(each.name, each.dtype, each.shape) for each in self.source.metadata()]
        self._asks(self.client.start_weight_update)
        self._asks(self.client.update_weights, {"names": [name for name, *_ in declared]})
        self.sent = dict(self.source)
        assert declared == [(name, value.dtype, tuple(value.shape)) for name, value in self.sent.items()]
        self._asks(self.client.finish_weight_update)

    def shutdown(self) -> None:
        self.is_open = False

    @staticmethod
    def _asks(call: Callable[..., None], *content: dict) -> None:
        try:
            call(*content)
        except Exception:
            threading.Event().wait()  # as NCCL waits, whose peer does not come


_LIBRARY: dict[str, Any] = {
    "vllm": SimpleNamespace(),
    "vllm.distributed.weight_transfer": SimpleNamespace(
        ParamMeta=SimpleNamespace,
        WeightSource=object,
        WeightTransferTrainerFactory=SimpleNamespace(trainer_init=_Trainer),
    ),
    "vllm.distributed.weight_transfer.nccl_engine": SimpleNamespace(NCCLTrainerInitInfo=SimpleNamespace),
}


@contextmanager
def vllm_library() -> Iterator[None]:
    """The library can be imported in this block."""
    sys.modules.update(_LIBRARY)
    try:
        yield
    finally:
        for name in _LIBRARY:
            del sys.modules[name]


class Serving:
    """`vllm serve`: its address, what it was asked, and `faults`, what it does wrong."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict]] = []
        self.faults: dict[str, Any] = {}
        self.ended = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # of clients that have left
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()

    def answer(self, path: str, content: dict) -> Any:
        self.asked.append((path, content))
        if path == "/v1/completions":
            return self._complete(content)
        if path == "/update_weights":
            self.ended.wait(self.faults.get("slow_update_s", 0))
        return {
            "/v1/models": {"data": [{"id": "the-policy"}]},
            "/server_info?config_format=json": {
                "vllm_config": {
                    "weight_transfer_config": self.faults.get("transfer", {"backend": "nccl"}),
                    "model_config": {"logprobs_mode": self.faults.get("mode", "processed_logprobs")},
                }
            },
            "/get_world_size": {"world_size": 1},
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
def vllm_serve() -> Iterator[Serving]:
    """The server, in threads of this process."""
    serving = Serving()
    threading.Thread(target=serving.server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield serving
    finally:
        serving.stop()
