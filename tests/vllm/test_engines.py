"""The engines that sample for `train grpo`, with vLLM itself: they have the policy after every update."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from odc_triton.jobs.rl.generation import CompletionEngine, Request, SamplingOptions
from odc_triton.jobs.vllm.http import Server
from tests.support import leftovers, ranks
from tests.support.families import with_lora
from tests.support.sampling import greedy, log_probabilities
from tests.support.vllm_real import ENVIRONMENT, RealServer, require_vllm, vllm_serve

require_vllm()
pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 3], [17, 40, 2, 8, 11], [6]]
UPDATES, TOKENS, TEMPERATURE = 3, 12, 0.7
# Two libraries' fp32 kernels, which add in different orders: up to 2e-6 was seen.
BOUND = 2e-5


def policy_of(start: str, kind: str) -> torch.nn.Module:
    """`kind`: whole; lora, of which B is not 0; shifted: lora, of which the base is no longer that of the files."""
    model = AutoModelForCausalLM.from_pretrained(start)
    if kind == "shifted":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[5] += 0.1
    return model if kind == "whole" else with_lora(model, targets=("q_proj", "o_proj", "up_proj", "down_proj"))


def follows_the_policy(rank: int, engine: CompletionEngine, model: torch.nn.Module, plain: Any) -> dict[str, Any]:
    """Updates the sharded model; after each the engine is asked for completions. What was seen of all."""
    from odc_triton import full_parameters, minibatch

    plain.eval()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
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


def _colocated(rank: int, world: int, start: str, kind: str) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    from odc_triton import fully_shard
    from odc_triton.jobs.rl.vllm_colocate import VllmColocate

    model = fully_shard(policy_of(start, kind))
    engine = VllmColocate(start, rank=rank, dtype="float32", max_tokens=128, lora_rank=0 if kind == "whole" else 4)
    try:
        seen = follows_the_policy(rank, engine, model, policy_of(start, kind))
        loaded = [] if kind == "whole" else engine._llm.llm_engine.list_loras()
        return seen | {"alone": engine._policy.request is not None, "adapters": len(loaded)}
    finally:
        engine.close()


@pytest.mark.parametrize(("kind", "alone"), [("whole", False), ("lora", True), ("shifted", False)])
def test_colocate(folder: Path, kind: str, alone: bool) -> None:
    before = leftovers.names()
    found = ranks.run(_colocated, 2, str(folder / "start"), kind)
    assert_followed(found)
    assert [(seen["alone"], seen["adapters"]) for seen in found] == [(alone, int(alone))] * 2
    leftovers.assert_none_since(before)


def _served(rank: int, world: int, start: str, address: str, kind: str = "whole") -> dict[str, Any]:
    from odc_triton import fully_shard
    from odc_triton.jobs.rl.vllm_server import VllmServer

    model = fully_shard(policy_of(start, kind))
    engine = VllmServer(address)
    engine.server.check(config=model.config, dtype="float32", tokens=128)
    try:
        seen = follows_the_policy(rank, engine, model, policy_of(start, kind))
    finally:
        engine.close()
    label = Server(address).get("/weight_info", timeout_s=60)["weight_version"]
    seen |= {"alone": engine.server.adapter is not None, "published": model._odc_engine.publication.number}
    return seen | {"version": -1 if label == "default" else int(label)}


def test_adapters_on_a_server(folder: Path, tmp_path: Path) -> None:
    """After a job that has loaded other weights, vLLM's base is no longer the policy's."""
    before, start = leftovers.names(), str(folder / "start")
    options, environment = ("--enable-lora", "--max-lora-rank", "8"), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm_serve(folder / "start", tmp_path / "log", *options, **environment) as server:
        jobs = [(_served, start, server.address, kind) for kind in ("lora", "lora", "whole", "lora")]
        for found, alone in zip(ranks.run_all(2, *jobs), (True, True, False, False), strict=True):
            assert_followed(found)
            assert [seen["alone"] for seen in found] == [alone] * 2
        names = {each["id"] for each in Server(server.address).get("/v1/models", timeout_s=60)["data"]}
        assert len(names) == 1  # each job has unloaded its last
    leftovers.assert_none_since(before)


def test_server(folder: Path, server: RealServer) -> None:
    found = ranks.run(_served, 2, str(folder / "start"), server.address)
    assert_followed(found)
    # It has the version that was read last, and one update followed.
    assert all(seen["version"] == seen["published"] - 1 for seen in found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of vLLM's import
@pytest.mark.parametrize(("quantization", "load_format"), [("fp8", "auto"), (None, "dummy")])
def test_bases_other_than_their_files(quantization: str | None, load_format: str) -> None:
    from odc_triton.jobs.vllm.engine import require_adaptable

    model, load = SimpleNamespace(quantization=quantization), SimpleNamespace(load_format=load_format)
    with pytest.raises(ValueError, match=r"is quantised .* or not loaded from its files"):
        require_adaptable(SimpleNamespace(model_config=model, load_config=load), None, [])


def _mixture(rank: int, world: int, start: str) -> None:
    os.environ.update(ENVIRONMENT)
    from odc_triton import fully_shard
    from odc_triton.jobs.rl.vllm_colocate import VllmColocate

    engine = VllmColocate(start, rank=rank, dtype="float32", max_tokens=128)
    try:
        with pytest.raises(ValueError, match="vLLM on CPUs computes experts wrongly after an update"):
            engine.sync(fully_shard(AutoModelForCausalLM.from_pretrained(start)))
    finally:
        engine.close()


def test_experts_on_cpus_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"head_dim": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, vocab_size=300)).save_pretrained(tmp_path)
    ranks.run(_mixture, 1, str(tmp_path))
