"""Lengths of completions for measurements of rollouts, drawn once, before anything was measured; and engines that
sample completions of these lengths. bench/data/rollouts.json says how they were drawn.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.prompts import completion_seed
from odc_triton.jobs.rl.transformers_engine import TransformersEngine
from odc_triton.jobs.rl.vllm_server import VllmServer
from odc_triton.jobs.vllm.policy_server import PolicyServer

from .provenance import ROOT

FILE = ROOT / "bench" / "data" / "rollouts.json"
STEPS, PROMPTS, GENERATIONS, LONGEST = 21, 12, 8, 256  # the first step is for warming up

Step = list[list[int]]  # tokens by prompt and completion


def read(path: Path = FILE) -> list[Step]:
    return json.loads(path.read_text(encoding="utf-8"))["steps"]


def by_seed(steps: Sequence[Step], seed: int) -> dict[int, int]:
    """Tokens by the seed that a run with `seed` gives to a completion."""
    return {
        completion_seed(seed, step, place, n): tokens
        for step, prompts in enumerate(steps)
        for place, completions in enumerate(prompts)
        for n, tokens in enumerate(completions)
    }


# ---------------------------------------------------------------------- engines


class ForcedServer(VllmServer):
    """`lengths`: tokens by seed. `came_s`: by seed, the time at which the completion was there."""

    def __init__(self, address: str, *, lengths: dict[int, int], **how: Any) -> None:
        super().__init__(address, **how)
        self.lengths, self.came_s = lengths, {}

    def _complete(self, name: str, ids: list[int], seed: int, options: SamplingOptions) -> Sampled:
        forced = replace(options, max_new_tokens=self.lengths[seed], end_tokens=())
        made = super()._complete(name, ids, seed, forced)
        self.came_s[seed] = time.monotonic()
        return made

    def turn_to(self, server: PolicyServer) -> None:
        self.server, self._http = server, server.http


class ForcedEngine(TransformersEngine):
    """As `ForcedServer`. A batch is decoded until its longest has ended, as always."""

    def __init__(self, *args: Any, lengths: dict[int, int], **how: Any) -> None:
        super().__init__(*args, **how)
        self.lengths, self.came_s = lengths, {}

    def generate(self, requests: Sequence[Request], options: SamplingOptions, inputs: Any = None) -> list:
        seeds = [seed for request in requests for seed in request.seeds]
        longest = max(self.lengths[seed] for seed in seeds)
        made = super().generate(requests, replace(options, max_new_tokens=longest, end_tokens=()), inputs)
        self.came_s |= dict.fromkeys(seeds, time.monotonic())

        def cut(one: Sampled, tokens: int) -> Sampled:
            return replace(one, ids=one.ids[:tokens], logps=one.logps[:tokens])

        return [
            [cut(one, self.lengths[seed]) for seed, one in zip(request.seeds, group, strict=True)]
            for request, group in zip(requests, made, strict=True)
        ]
