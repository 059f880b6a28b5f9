"""Completions from vLLM's own server, `vllm serve`, which gets the policy's weights before each rollout.

Written against vLLM's documentation (0.28 to 0.32: the OpenAI-compatible server, "Weight Transfer") and tested with a
stand-in of that interface; it has not run with vLLM itself. Start the server with:

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs \\
        --weight-transfer-config '{"backend": "nccl"}'

[Note: weights to the server] One rank reads the policy, one-sidedly, and vLLM's trainer engine sends it over NCCL, in
packed chunks of 1 GiB. That engine announces them to the server by the four calls of `_Control`. NCCL has no deadline,
and keeps waiting after the server has refused: so the engine runs in its own thread, and this rank waits for the
thread, the deadline, or a refusal, whichever is first.
"""

from __future__ import annotations

import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from ..base.errors import OfRanks, describe
from ..checkpoint.pretrained_tensors import PretrainedTensors
from ..engine.api import engine_of
from .generation import GenerationFailed, Request, Sampled, SamplingOptions
from .http import Refused, Server
from .vllm_sampling import parameters, sampled

_SENDER = 0
_TOGETHER = 256  # requests in flight per rank: vLLM batches them
_SHORT_S = 30.0  # for answers that need no work
_SYNC = "weights for the vLLM server"
_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs "
    """--weight-transfer-config '{"backend": "nccl"}'"""
)


class WeightsNotSent(OfRanks, GenerationFailed):
    """Raised on the other ranks if one could not send the weights to the server."""


class VllmServer:
    """A `CompletionEngine` on the vLLM server at `address`, such as http://127.0.0.1:8000; nothing is sent elsewhere.

    `timeout_s`: of each completion; `sync_timeout_s`: of one transfer of the weights. `generate` raises
    GenerationFailed if the server is gone, late, or gives an unexpected answer. So does `sync` if it refuses the
    weights; the other ranks then raise WeightsNotSent.
    """

    samples_elsewhere = True

    def __init__(self, address: str, *, rank: int, timeout_s: float = 600.0, sync_timeout_s: float = 600.0) -> None:
        self._server = Server(address)
        self._rank, self._timeout_s, self._sync_timeout_s = rank, timeout_s, sync_timeout_s
        self._model_name: str | None = None
        self._sending: tuple[_Control, Any] | None = None  # on the rank that sends: with vLLM's engine for this side

    def check(self) -> None:
        """Checks that the server is up and can serve this job, so that a job can fail before its ranks start.

        Raises GenerationFailed with the command to start it. Warns if its kind of log-probabilities is unknown.
        """
        self._server.get("/health", timeout_s=_SHORT_S)
        try:
            config = self._server.get("/server_info?config_format=json", timeout_s=_SHORT_S)
        except Refused as refusal:
            raise GenerationFailed(f"{refusal}; {_START}") from None
        try:
            config = config["vllm_config"]
            transfer, mode = config["weight_transfer_config"], (config["model_config"] or {}).get("logprobs_mode")
        except (KeyError, TypeError, AttributeError):
            raise GenerationFailed(
                f"the server at {self._server.address} does not report its configuration (vllm_config): {_START}"
            ) from None
        problem = None
        if transfer is None or transfer.get("backend") != "nccl":
            problem = f"takes no weights over NCCL (weight_transfer_config is {transfer})"
        elif mode not in (None, "processed_logprobs"):
            problem = f"returns {mode}, not those after the temperature"
        if problem is not None:
            raise GenerationFailed(f"the server at {self._server.address} {problem}: {_START}")
        if mode is None:
            warnings.warn(
                f"the server at {self._server.address} does not report which log-probabilities it returns; they must "
                f"be those after the temperature: {_START}",
                stacklevel=2,
            )

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        """One HTTP request for each completion, as each has its seed; vLLM keeps the prompt's part of the cache."""
        wanted = [(request.ids, seed) for request in requests for seed in request.seeds]
        if not wanted:
            return [[] for _ in requests]
        name = self._name()
        with ThreadPoolExecutor(max_workers=min(_TOGETHER, len(wanted))) as pool:
            futures = [pool.submit(self._complete, name, ids, seed, options) for ids, seed in wanted]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._server.abort()
                raise
        completions = (future.result() for future in futures)
        return [[next(completions) for _ in request.seeds] for request in requests]

    def _name(self) -> str:
        if self._model_name is None:
            answer = self._server.get("/v1/models", timeout_s=_SHORT_S)
            self._model_name = self._part(answer, lambda: answer["data"][0]["id"])
        return self._model_name

    def _complete(self, name: str, ids: list[int], seed: int, options: SamplingOptions) -> Sampled:
        asked = {"model": name, "prompt": ids, "return_token_ids": True, **parameters(options, seed)}
        answer = self._server.post("/v1/completions", asked, timeout_s=self._timeout_s)
        choices = self._part(answer, lambda: list(answer["choices"]))
        if len(choices) != 1:
            raise GenerationFailed(
                f"the server at {self._server.address} returned {len(choices)} completions instead of 1: is it vLLM?"
            )
        (choice,) = choices
        parts = self._part(
            answer,
            lambda: (list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]), choice["finish_reason"]),
        )
        return sampled(*parts, options)

    def _part(self, answer: Any, take: Callable[[], Any]) -> Any:
        try:
            return take()
        except (KeyError, TypeError, IndexError):
            raise GenerationFailed(
                f"the server at {self._server.address} gave an answer that is not vLLM's: {str(answer)[:300]!r}"
            ) from None

    def sync(self, model: nn.Module) -> None:
        """[Note: weights to the server] A barrier once the server has the weights: no rank samples older ones."""
        failure: Exception | None = None
        if self._rank == _SENDER:
            try:
                self._send(model)
            except Exception as error:
                failure = error
        problem = None if failure is None else describe(failure)
        answers = engine_of(model).barrier.exchange(_SYNC, {"problem": problem})
        if failure is not None:
            raise failure
        if (problem := answers[_SENDER]["problem"]) is not None:
            raise WeightsNotSent([_SENDER], f"rank {_SENDER} did not send the {_SYNC}: {problem}")

    def _send(self, model: nn.Module) -> None:
        control, transfer = self._sending or (_Control(self._server, timeout_s=self._sync_timeout_s), None)
        self._sending = None  # if it fails, the next one connects anew

        def send() -> None:
            nonlocal transfer
            if transfer is None:
                transfer = self._connect(control, PretrainedTensors(model))
            transfer.send_weights()

        control.watch(send)
        self._sending = control, transfer
        answer = self._server.post("/reset_prefix_cache", timeout_s=_SHORT_S)  # it is of the old weights
        if isinstance(answer, dict) and answer.get("success") is False:
            raise GenerationFailed(
                f"the server at {self._server.address} keeps its prefix cache, as others use it: give the job its own"
            )

    def _connect(self, control: _Control, weights: PretrainedTensors) -> Any:
        """vLLM's engine of the trainer's side, connected with the server's workers."""
        try:
            from vllm.distributed.weight_transfer import ParamMeta, WeightSource, WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
        except ImportError as error:
            raise GenerationFailed(
                f"weights go to a vLLM server by vLLM's own library, which can't be imported here ({error}): install "
                f"the version that the server has, 0.28 or newer"
            ) from None

        class PolicyWeightSource(WeightSource):
            def metadata(self) -> list[Any]:
                return [ParamMeta(name=name, dtype=dtype, shape=shape) for name, dtype, shape in weights.metadata()]

            def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
                return iter(weights)

        answer = self._server.get("/get_world_size", timeout_s=_SHORT_S)
        workers = self._part(answer, lambda: int(answer["world_size"]))
        with socket.create_connection((self._server.host, self._server.port), timeout=_SHORT_S) as connection:
            mine = connection.getsockname()[0]  # where the server reaches this machine
        with socket.create_server((mine, 0)) as probe:
            port = probe.getsockname()[1]
        return WeightTransferTrainerFactory.trainer_init(
            init_info=NCCLTrainerInitInfo(master_address=mine, master_port=port, world_size=workers + 1, rank=0),
            client=control,
            source=PolicyWeightSource(),
        )

    def close(self) -> None:
        """Closes the connection; the server keeps running."""
        if self._sending is not None:
            self._sending[1].shutdown()
            self._sending = None


class _Control:
    """vLLM's VLLMWeightSyncClient, the engine's requests to the server; a refusal ends the wait for NCCL."""

    def __init__(self, server: Server, *, timeout_s: float) -> None:
        self._server, self._timeout_s = server, timeout_s
        self._ended = threading.Event()
        self._failure: BaseException | None = None

    def watch(self, send: Callable[[], None]) -> None:
        """Runs `send` until it returns, the server refuses one of the calls below, or the deadline."""

        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if gpu is not None:
                    torch.cuda.set_device(gpu)  # a thread begins with GPU 0
                send()
            except BaseException as error:
                self._failure = self._failure or error
            self._ended.set()

        self._ended.clear()
        threading.Thread(target=run, name="odc-weights", daemon=True).start()
        if not self._ended.wait(self._timeout_s):
            raise GenerationFailed(
                f"the weights did not reach the server at {self._server.address} within {self._timeout_s:g} s: see its "
                f"log, or give more time"
            )
        if isinstance(self._failure, GenerationFailed):
            raise self._failure
        if self._failure is not None:
            raise GenerationFailed(
                f"the weights could not be sent to the server at {self._server.address}: {describe(self._failure)}"
            ) from self._failure

    def _call(self, path: str, content: dict[str, Any]) -> None:
        try:
            self._server.post(path, content, timeout_s=self._timeout_s)
        except BaseException as error:
            self._failure = self._failure or error
            self._ended.set()
            raise

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._call("/start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._call("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("/finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})
