"""Completions from vLLM's own server, `vllm serve`, which reads the policy before each rollout."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from torch import nn

from ...base.errors import GenerationFailed
from ...policy.offer import PolicyOffer, offer_policy
from ..vllm.policy_server import SHORT_S, PolicyServer
from .generation import CompletionEngine, Request, Sampled, SamplingOptions
from .vllm_sampling import parameters, sampled

_TOGETHER = 256  # requests in flight per rank: vLLM batches them


class VllmServer(CompletionEngine):
    """A `CompletionEngine` on the vLLM server at `address`, such as http://127.0.0.1:8000; nothing is sent elsewhere.

    `timeout_s`: of each request: a completion, or a part of reading the policy.
    `generate` raises GenerationFailed if the server is gone, late, or gives an unexpected answer. So does `sync` if it
    can't read the policy: see `PolicyServer.refresh`.
    """

    samples_elsewhere = True
    samples_remotely = True

    def __init__(self, address: str, *, timeout_s: float = 600.0) -> None:
        self.server = PolicyServer(address, timeout_s=timeout_s)
        self._http, self._timeout_s = self.server.http, timeout_s
        self._model_name: str | None = None
        self._offer: PolicyOffer | None = None

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        """One HTTP request for each completion, as each has its seed; vLLM keeps the prompt's part of the cache."""
        wanted = [(request.ids, seed) for request in requests for seed in request.seeds]
        name = self._name()
        with ThreadPoolExecutor(max_workers=min(_TOGETHER, len(wanted))) as pool:
            futures = [pool.submit(self._complete, name, ids, seed, options) for ids, seed in wanted]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self._http.abort()
                raise
        completions = (future.result() for future in futures)
        return [[next(completions) for _ in request.seeds] for request in requests]

    def _name(self) -> str:
        if self.server.adapter is not None:
            return self.server.adapter
        if self._model_name is None:
            answer = self._http.get("/v1/models", timeout_s=SHORT_S)
            self._model_name = self.server.part(answer, lambda: answer["data"][0]["id"])
        return self._model_name

    def _complete(self, name: str, ids: list[int], seed: int, options: SamplingOptions) -> Sampled:
        asked = {"model": name, "prompt": ids, "return_token_ids": True, **parameters(options, seed)}
        answer = self._http.post("/v1/completions", asked, timeout_s=self._timeout_s)
        choices = self.server.part(answer, lambda: list(answer["choices"]))
        if len(choices) != 1:
            raise GenerationFailed(
                f"the server at {self._http.address} returned {len(choices)} completions instead of 1: is it vLLM?"
            )
        (choice,) = choices
        parts = self.server.part(
            answer,
            lambda: (list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"]), choice["finish_reason"]),
        )
        return sampled(*parts, options)

    def sync(self, model: nn.Module) -> None:
        """The server reads the policy, and no rank sends anything. Every rank calls it."""
        if self._offer is None:
            self._offer = offer_policy(model, max_lag=0.0)  # no rank publishes while the server reads: all wait
        self.server.refresh(model, self._offer)

    def abort(self) -> None:
        self._http.abort()

    def close(self) -> None:
        """Ends the offer; the server keeps running, without the adapter."""
        if self._offer is not None:
            with contextlib.suppress(GenerationFailed):
                self.server.unload()
            self._offer.close()
            self._offer = None
