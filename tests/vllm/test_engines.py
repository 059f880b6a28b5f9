"""The engines that sample for `train grpo`, with vLLM itself: they have the policy after every update."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from odc_triton.jobs.rl.generation import CompletionEngine, Request, SamplingOptions
from tests.support import ranks
from tests.support.sampling import greedy, log_probabilities
from tests.support.vllm_real import ENVIRONMENT, RealServer, require_vllm

require_vllm()
pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 3], [17, 40, 2, 8, 11], [6]]
UPDATES, TOKENS, TEMPERATURE = 3, 12, 0.7
# Two libraries' fp32 kernels, which add in different orders: up to 2e-6 was seen.
BOUND = 2e-5


def follows_the_policy(rank: int, engine: CompletionEngine, model: torch.nn.Module, start: str) -> dict[str, Any]:
    """Updates the sharded model; after each the engine is asked for completions. What was seen of all."""
    from odc_triton import full_parameters, minibatch

    plain = AutoModelForCausalLM.from_pretrained(start).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = SamplingOptions(temperature=TEMPERATURE, max_new_tokens=TOKENS, end_tokens=())
    assert engine.generate([], options) == []
    seen: dict[str, Any] = {"greedy": [], "policy": [], "difference": 0.0}
    for step in range(UPDATES + 1):
        engine.sync(model)
        with torch.no_grad():
            for name, value in full_parameters(model):
                plain.get_parameter(name).copy_(value)
        requests = [Request(ids=ids, seeds=[step]) for ids in PROMPTS]
        made = engine.generate(requests, SamplingOptions(temperature=0.0, max_new_tokens=TOKENS, end_tokens=()))
        seen["greedy"].append([one.ids for (one,) in made])
        seen["policy"].append([greedy(plain, ids, TOKENS) for ids in PROMPTS])
        for ids, (one,) in zip(PROMPTS, engine.generate(requests, options), strict=True):
            want = log_probabilities(plain, ids, one.ids, TEMPERATURE)
            seen["difference"] = max(seen["difference"], (torch.tensor(one.logps) - want).abs().max().item())
        with minibatch(model, tokens=1):
            ids = torch.randint(3, 300, (1, 16), generator=torch.Generator().manual_seed(10 * step + rank))
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return seen


def assert_followed(found: list[dict[str, Any]]) -> None:
    for seen in found:
        assert seen["greedy"] == seen["policy"]
        assert all(one != other for one, other in zip(seen["policy"], seen["policy"][1:], strict=False))
        assert seen["difference"] < BOUND


def _colocated(rank: int, world: int, start: str) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    from odc_triton import fully_shard
    from odc_triton.jobs.rl.vllm_colocate import VllmColocate

    model = fully_shard(AutoModelForCausalLM.from_pretrained(start))
    engine = VllmColocate(start, rank=rank, dtype="float32", max_tokens=128)
    try:
        return follows_the_policy(rank, engine, model, start)
    finally:
        engine.close()


def test_colocate(folder: Path) -> None:
    found = ranks.run(_colocated, 2, str(folder / "start"))
    assert_followed(found)


def _served(rank: int, world: int, start: str, address: str) -> dict[str, Any]:
    from odc_triton import fully_shard
    from odc_triton.jobs.rl.vllm_server import VllmServer
    from odc_triton.jobs.vllm.http import Server

    model = fully_shard(AutoModelForCausalLM.from_pretrained(start))
    engine = VllmServer(address)
    engine.server.check(config=model.config, dtype="float32", tokens=128)
    try:
        seen = follows_the_policy(rank, engine, model, start)
    finally:
        engine.close()
    label = Server(address).get("/weight_info", timeout_s=60)["weight_version"]
    return seen | {"version": int(label), "published": model._odc_engine.publication.number}


def test_server(folder: Path, server: RealServer) -> None:
    found = ranks.run(_served, 2, str(folder / "start"), server.address)
    assert_followed(found)
    # It has the version that was read last, and one update followed.
    assert all(seen["version"] == seen["published"] - 1 for seen in found)
