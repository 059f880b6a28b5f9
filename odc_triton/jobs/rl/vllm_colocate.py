"""Completions from a vLLM engine in each rank's process, on the device that it trains on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ...base.environment import environment
from ...base.errors import GenerationFailed
from ..vllm.adapter import room_for
from ..vllm.policy_server import OLDEST, is_too_old
from .generation import CompletionEngine, Request, Sampled, SamplingOptions
from .vllm_sampling import parameters, sampled


class VllmColocate(CompletionEngine):
    """A `CompletionEngine` of this rank alone: vLLM has the whole model of `folder` on this rank's device.

    `dtype`: the policy's compute dtype. `memory`: the part of the device's memory that vLLM takes, for weights and
    cache. `max_tokens`: of a prompt and its completion together, by default the maximum of the model's config.
    `lora_rank`: of the policy's adapters. Every rank makes one, after the process group. Each rank reads the policy
    itself. Calls in this process can't have a deadline; other ranks' waits for this one have.

    Raises GenerationFailed if vLLM is not installed or too old, or returns something unexpected.
    """

    samples_elsewhere = True
    samples_remotely = False

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int,
        dtype: str,
        memory: float = 0.3,
        max_tokens: int | None = None,
        lora_rank: int = 0,
    ) -> None:
        try:
            import vllm
        except ImportError as error:
            raise GenerationFailed(f"vLLM can't be imported here ({error}): install it, {OLDEST} or newer") from None
        if is_too_old(vllm.__version__):
            raise GenerationFailed(f"vLLM {vllm.__version__} is here: install {OLDEST} or newer")
        from ..vllm.engine import ColocatedPolicy, adapts

        # What torchrun sets, and a world of one has not; and the model is to be in this process.
        place = {"RANK": str(rank), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0")}
        with environment(**place, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
            self._llm = vllm.LLM(
                model=str(folder),
                dtype=dtype,
                skip_tokenizer_init=True,  # it gets and returns tokens
                tensor_parallel_size=1,
                distributed_executor_backend="external_launcher",
                gpu_memory_utilization=memory,
                max_model_len=max_tokens,
                seed=rank,
                logprobs_mode="processed_logprobs",  # after the temperature
                enable_lora=lora_rank > 0 and adapts(str(folder)),
                max_lora_rank=room_for(lora_rank),
            )
        self._policy = ColocatedPolicy(self._llm)

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        """One prompt for each completion, as each has its seed; vLLM keeps the prompt's part of the cache."""
        from vllm import SamplingParams

        wanted = [(request.ids, seed) for request in requests for seed in request.seeds]
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids, _ in wanted],
            sampling_params=[SamplingParams(**parameters(options, seed)) for _, seed in wanted],
            use_tqdm=False,
            lora_request=self._policy.request,
        )
        if len(outputs) != len(wanted):
            raise GenerationFailed(f"vLLM returned {len(outputs)} completions instead of {len(wanted)}")
        completions = (_completion(output, options) for output in outputs)
        return [[next(completions) for _ in request.seeds] for request in requests]

    def sync(self, model: nn.Module) -> None:
        """Reads the policy."""
        self._policy.sync(model)
        if self._llm.reset_prefix_cache() is False:  # it is of the old weights
            raise GenerationFailed("vLLM keeps its prefix cache: some of its requests have not ended")

    def close(self) -> None:
        """Frees the engine."""
        self._llm = self._policy = None


def _completion(output: Any, options: SamplingOptions) -> Sampled:
    (one,) = output.outputs
    ids = list(one.token_ids)
    logps = [of_token[token].logprob for token, of_token in zip(ids, one.logprobs or [], strict=False)]
    return sampled(ids, logps, one.finish_reason, options)
