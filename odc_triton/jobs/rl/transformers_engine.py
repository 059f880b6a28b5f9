"""Completions sampled by the sharded policy itself, through transformers' `generate`.

Outside of a minibatch there is no synchronisation: ranks decode different prompts independently.

[Note: draws] A token is drawn by one uniform number, by inverting the cumulative distribution. A completion's uniform
numbers come from its own seed, so the other completions of the batch affect only rounding. `generate` runs greedily, on
scores of which only the drawn token's is finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ...engine.module import ODCModule
from ...nn.modes import evaluating
from ...packs.padding import padding_leaks
from ...packs.router_loss import router_weight
from .generation import CompletionEngine, Request, Sampled, SamplingOptions

_POLL_S = 0.5


class TransformersEngine(CompletionEngine):
    """Samples from `model`, sharded.

    `should_stop`, called about twice a second, may raise; if it returns True, decoding stops.
    """

    samples_elsewhere = False
    samples_remotely = False

    def __init__(self, model: nn.Module, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        self.model, self._should_stop = model, should_stop

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        """[request][seed]: decoded together; where padding leaks, those of prompts of one length."""
        check, leaks = _StopCheck(self._should_stop), padding_leaks(self.model)
        made: dict[int, list[Sampled]] = {}
        for length in {len(request.ids) if leaks else 0 for request in requests}:
            together = {place: each for place, each in enumerate(requests) if not leaks or len(each.ids) == length}
            made |= zip(together, self._decoded([*together.values()], options, check), strict=True)
        return [made[place] for place in range(len(requests))]

    def _decoded(self, requests: list[Request], options: SamplingOptions, check: _StopCheck) -> list[list[Sampled]]:
        model = self.model
        rows = [request.ids for request in requests for _ in request.seeds]
        longest, pad = max(map(len, rows)), options.end_tokens[0] if options.end_tokens else 0
        device = next(model.parameters()).device
        ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
        there = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        draw = _Draw([seed for request in requests for seed in request.seeds], options, start=longest)
        config = GenerationConfig(
            max_new_tokens=options.max_new_tokens,
            eos_token_id=list(options.end_tokens) or None,
            pad_token_id=pad,
            use_cache=True,
            # These override a model's own config: log-probabilities are the policy's.
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            min_new_tokens=0,
        )
        # Transformers can't compute the routers' loss of a cache's tokens.
        given = {"output_router_logits": False} if router_weight(model) else {}
        # Compiled blocks would get a graph of each length of the cache.
        with evaluating(model), self._whole(), torch.compiler.set_stance("force_eager"):
            made = model.generate(
                input_ids=ids,
                attention_mask=there,
                **given,
                generation_config=config,
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([check]),
            )
        answers = iter(_cut(made[:, longest:].tolist(), draw.logps(), options.end_tokens))
        return [[next(answers) for _ in request.seeds] for request in requests]

    def sync(self, model: nn.Module) -> None:
        """Nothing to do: the policy itself samples."""

    def close(self) -> None:
        """Nothing was started."""

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """The root's own weights: PEFT's `generate` never calls the root's forward."""
        if isinstance(self.model, ODCModule):
            self.model.unshard()
        try:
            yield
        finally:
            if isinstance(self.model, ODCModule):
                self.model.reshard()


def _cut(rows: list[list[int]], logps: list[list[float]], end_tokens: tuple[int, ...]) -> Iterator[Sampled]:
    for ids, known in zip(rows, logps, strict=True):
        end = next((place for place, token in enumerate(ids) if token in end_tokens), None)
        count = len(ids) if end is None else end + 1
        yield Sampled(ids=ids[:count], logps=known[:count], ended=end is not None)


class _Draw(LogitsProcessor):
    """Draws each row's next token; see [Note: draws]. Keeps its log-probability."""

    def __init__(self, seeds: list[int], options: SamplingOptions, *, start: int) -> None:
        self._temperature, self._start = options.temperature, start
        self._drawn: list[Tensor] = []
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scaled = scores.float() / self._temperature if self._temperature else scores.float()
        if self._temperature:
            uniform = torch.cat([torch.rand(1, generator=each, dtype=torch.float64) for each in self._generators])
            mass = scaled.softmax(-1).double().cumsum(-1)
            at = uniform.to(mass.device)[:, None] * mass[:, -1:]
            chosen = torch.searchsorted(mass, at, right=True).clamp(max=mass.shape[1] - 1)
        else:
            chosen = scaled.argmax(-1, keepdim=True)
        self._drawn.append(scaled.log_softmax(-1).gather(1, chosen)[:, 0].cpu())
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    def logps(self) -> list[list[float]]:
        """By row, of every token drawn."""
        return torch.stack(self._drawn, dim=1).tolist()


class _StopCheck(StoppingCriteria):
    """Of all batches of one call."""

    def __init__(self, should_stop: Callable[[], bool]) -> None:
        self._should_stop, self._polled_s, self._stops = should_stop, time.monotonic(), False

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        if not self._stops and time.monotonic() - self._polled_s >= _POLL_S:
            self._polled_s = time.monotonic()
            self._stops = self._should_stop()
        return torch.full((len(input_ids),), self._stops, dtype=torch.bool, device=input_ids.device)
