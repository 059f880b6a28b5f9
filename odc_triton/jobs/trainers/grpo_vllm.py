"""vLLM for ODCGRPOTrainer: TRL's VLLMGeneration, whose vLLM has the weights of a sharded model.

[Note: TRL's server mode] TRL's client sends weights over NCCL from rank 0, and its requests wait for ever. Here the
server reads the policy when rank 0 asks it to, and each request has a timeout. Each rank asks for its own
completions: with tools ranks sample different numbers of times, and TRL's rank 0, which asks for all, would wait for
ranks that don't come.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from ...base.errors import GenerationFailed
from ...checkpoint.parameters import sharded_parameters
from ...policy.offer import offer_policy
from ..vllm.policy_server import SHORT_S, PolicyServer

if TYPE_CHECKING:
    from trl import GRPOTrainer

_RETRY_S = 1.0
_SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "logprobs")
_SAMPLING += ("structured_outputs_regex", "generation_kwargs")


class ShardedVllmGeneration(VLLMGeneration):
    """VLLMGeneration of a trainer whose model is sharded; made after TRL's constructor, from the same arguments.

    In colocate mode vLLM reloads its weights layer by layer, which also takes weights that it packed or quantised when
    it had loaded them. Each rank reads the policy itself, and none waits for another. See [Note: TRL's server mode].

    Raises GenerationFailed for a server that is gone, late, can't serve this job or does not read the policy,
    NotImplementedError for a server if the model is on GPUs, ValueError for a model of unknown origin.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = trainer.args
        self._timeout_s = args.ddp_timeout  # so long the other ranks wait
        given: dict[str, Any] = {}
        for name in inspect.signature(VLLMGeneration).parameters:  # TRL's names, with and without vllm_
            for field in (f"vllm_{name}", name):
                if hasattr(args, field):
                    given[name] = getattr(args, field)
        super().__init__(
            model=trainer.model,
            accelerator=trainer.accelerator,
            processing_class=trainer.processing_class,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            **given,
        )

    def _init_vllm(self) -> None:
        if self.mode == "server":
            self._connect(self.server_base_url or f"http://{self.server_host}:{self.server_port}")
            return
        if not self.model.name_or_path:
            raise ValueError(
                "use_vllm is set, and vLLM loads the model from its folder or hub id, which is unknown: load the model "
                "by from_pretrained, or set model.name_or_path"
            )
        super()._init_vllm()
        from ..vllm.engine import ColocatedPolicy

        self._policy = ColocatedPolicy(self.llm, takes_adapter=False)  # TRL's requests name none

    def _connect(self, address: str) -> None:
        self._offer = offer_policy(self.model, max_lag=0.0)  # no rank publishes while the server reads: all wait
        self._server = PolicyServer(address, timeout_s=self._timeout_s)
        end_s = time.monotonic() + self.server_timeout
        while True:
            try:
                self._server.http.get("/health", timeout_s=SHORT_S)
                break
            except GenerationFailed:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_RETRY_S)
        embedded = sharded_parameters(self.model)[id(self.model.get_input_embeddings().weight)]
        self._server.check(config=self.model.config, dtype=embedded.shard.spec.compute_dtype)
        self.vllm_client = PolicyClient(self._server, timeout_s=self._timeout_s)
        self.sync_weights()  # fails before training if it fails

    def sync_weights(self) -> None:
        """vLLM gets the policy as it is now. Every rank calls it."""
        if self.mode == "server":
            self._server.refresh(self.model, self._offer)
            self.vllm_client.model = self._server.adapter or self.vllm_client.model
        else:
            super().sync_weights()

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Updates all at once; nothing is left that TRL would load tensor by tensor."""
        self._policy.sync(self.model)
        return iter(())

    def generate(
        self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[list, list, list, list]:
        """As TRL's; with a server this rank alone asks for one completion of each prompt."""
        if self.mode != "server":
            return super().generate(prompts, images, num_generations, profiler)
        sampling = {name: getattr(self, name) for name in _SAMPLING}
        sampling |= {"min_p": self.min_p or 0.0, "max_tokens": self.max_completion_length}
        with profiler or nullcontext():
            found = self.vllm_client.generate(prompts, **sampling)
        return tuple(found[name] for name in ("prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"))


class PolicyClient(VLLMClient):
    """TRL's client of a server that has been checked. It sends no weights, and repeats no request."""

    def __init__(self, server: PolicyServer, *, timeout_s: float) -> None:
        super().__init__(server.http.address)
        self._server, self._timeout_s = server, timeout_s

    def _post(self, url: str, **content: Any) -> dict:
        return self._server.http.post(url.removeprefix(self.base_url), content.get("json"), timeout_s=self._timeout_s)
