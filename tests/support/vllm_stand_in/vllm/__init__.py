"""A stand-in of vLLM's documented interface, on the CPU, by transformers: what odc_triton.rl uses of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import torch


@dataclass
class SamplingParams:
    n: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    logprobs: int


@dataclass
class _Loadable:
    """vLLM's model: takes weights by a checkpoint's names, in any number of calls."""

    plain: torch.nn.Module
    calls: list[list[str]] = field(default_factory=list)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.calls.append([name for name, _ in weights])
        known = self.plain.state_dict()
        for name, value in weights:
            known[name].copy_(value)


class LLM:
    """Starts with weights that are nobody's."""

    def __init__(self, model: str, **options: object) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.options = options
        torch.manual_seed(12345)
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        runner = SimpleNamespace(model=_Loadable(plain))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)
        self.model = runner.model
        self.resets = 0

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True

    @torch.no_grad()
    def generate(self, prompts: list[dict], sampling_params: list[SamplingParams], use_tqdm: bool) -> list:
        return [
            SimpleNamespace(outputs=[self._complete(prompt["prompt_token_ids"], asked)])
            for prompt, asked in zip(prompts, sampling_params, strict=True)
        ]

    def _complete(self, prompt: list[int], asked: SamplingParams) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(asked.seed)
        ids: list[int] = []
        logprobs: list[dict] = []
        reason = "length"
        while len(ids) < asked.max_tokens and reason == "length":
            logits = self.model.plain(torch.tensor([prompt + ids]), use_cache=False).logits[0, -1].float()
            logps = (logits / (asked.temperature or 1.0)).log_softmax(-1)
            greedy = asked.temperature == 0
            token = int(logps.argmax() if greedy else torch.multinomial(logps.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(logps[token]), rank=1)})
            if token in asked.stop_token_ids:
                reason = "stop"
        return SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
