"""ODCGRPOTrainer with vLLM itself, on CPUs: in each rank's process, and as a server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support import trl_case as case
from tests.support.deadlines import SHORT_S
from tests.support.families import causal_lm
from tests.support.sampling import greedy
from tests.support.vllm_real import ENVIRONMENT, require_vllm, vllm_serve

require_vllm()
pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 3], [17, 40, 2, 8, 11], [6]]
BOUND = 1e-5  # between log-probabilities of vLLM's kernels and ours, both in fp32; up to 1e-6 was seen
STEPS = 4


def _saved(folder: Path, vocabulary: int = 128) -> str:
    """A model and its tokenizer; vLLM's attention on CPUs takes heads of 32 and more."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "vocab_size": vocabulary, "max_position_embeddings": 256}
    causal_lm("Qwen2", **sizes).save_pretrained(folder)
    case.tokenizer().save_pretrained(folder)
    return str(folder)


def _trained(rank: int, world: int, folder: str, start: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A run whose engine says, before it samples for each step and after the last, what it would sample greedily."""
    from odc_triton import full_parameters
    from odc_triton.hf import ODCGRPOTrainer

    case.environment()
    lora, compared = changes.pop("lora", None), []
    plain = case.adapted(case.model_of(start), lora).eval()

    class Compared(ODCGRPOTrainer):
        @torch.no_grad()
        def compare(self) -> None:
            for name, value in full_parameters(self.model):
                plain.get_parameter(name).copy_(value)
            want = [greedy(plain, prompt, 12) for prompt in PROMPTS]
            engine = self.vllm_generation
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(engine, "temperature", 0.0)
                patch.setattr(engine, "max_completion_length", 12)
                patch.setattr(engine, "generation_kwargs", {"ignore_eos": True})
                found = engine.generate(PROMPTS, None, 1)[1]
            compared.append((want, found))

        def _generate(self, prompts: list[Any]) -> Any:
            sampled = super()._generate(prompts)
            self.compare()
            return sampled

    given = case.given() | {"rollout_func": _two_turns if changes.pop("turns", 1) == 2 else None}
    args = case.arguments(folder, case.ROWS // world, use_vllm=True, max_steps=STEPS, **changes)
    trainer = Compared(case.sharded(start, lora=lora), args=args, **given)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    trainer.compare()
    alone = trainer.vllm_generation.mode == "server" and trainer.vllm_generation._server.adapter is not None
    return {"logs": trainer.state.log_history[:STEPS], "compared": compared, "alone": alone}


def _two_turns(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Each completion is a turn, two tokens that its environment wrote, and another turn."""
    engine, written = trainer.vllm_generation, [7, 8]
    before = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    _, first, first_logps, _ = engine.generate(before, None, trainer.num_generations)
    then = [prompt + turn + written for prompt, turn in zip(before, first, strict=True)]
    _, second, second_logps, _ = engine.generate(then, None, 1)
    both = list(zip(first, second, strict=True))
    logps = zip(first_logps, second_logps, strict=True)
    return {
        "prompt_ids": before,
        "completion_ids": [[*one, *written, *other] for one, other in both],
        "logprobs": [[*(of[0] for of in one), 0.0, 0.0, *(of[0] for of in other)] for one, other in logps],
        "env_mask": [[1] * len(one) + [0, 0] + [1] * len(other) for one, other in both],
    }


def _colocated(rank: int, world: int, folder: str, start: str, changes: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(ENVIRONMENT)
    from trl.generation import vllm_generation

    vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)
    return _trained(rank, world, folder, start, changes | {"vllm_mode": "colocate", "vllm_max_model_length": 128})


def test_colocate(tmp_path: Path) -> None:
    start = _saved(tmp_path / "model")
    for found in ranks.run(_colocated, 2, str(tmp_path / "run"), start, {}):
        _assert_same_policy(found)


def _assert_same_policy(found: dict[str, Any]) -> None:
    compared = found["compared"]
    assert len(compared) == STEPS + 1
    assert all(of_vllm == of_policy for of_vllm, of_policy in compared)
    assert all(compared[i][0] != compared[i + 1][0] for i in range(STEPS))  # or older weights would not show
    for log in found["logs"]:
        assert log["sampling/sampling_logp_difference/max"] < BOUND
        for end in ("min", "mean", "max"):
            assert log[f"sampling/importance_sampling_ratio/{end}"] == pytest.approx(1, abs=2 * case.MAX_TOKENS * BOUND)


def _server_mode(address: str, **changes: Any) -> dict[str, Any]:
    return {"vllm_mode": "server", "vllm_server_base_url": address, "vllm_server_timeout": 0.0, **changes}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The model's folder, and the address of a server that has it."""
    folder = tmp_path_factory.mktemp("served")
    start = _saved(folder / "model")
    options, environment = ("--enable-lora", "--max-lora-rank", "8"), {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with vllm_serve(Path(start), folder / "log", *options, **environment) as server:
        yield start, server.address


@pytest.mark.parametrize("lora", ["trained", None])  # in this order: the second loads other weights into the server
def test_server(tmp_path: Path, served: tuple[str, str], lora: str | None) -> None:
    start, address = served
    for found in ranks.run(_trained, 2, str(tmp_path), start, _server_mode(address, turns=2, lora=lora)):
        _assert_same_policy(found)
        assert found["alone"] is (lora is not None)


def _failed(rank: int, world: int, folder: str, start: str, changes: dict[str, Any]) -> str:
    """How a run failed on this rank; `ends`: what happens to the server's processes in the second step, and when."""
    import torch.distributed as dist

    from odc_triton.base.errors import GenerationFailed
    from odc_triton.hf import ODCGRPOTrainer
    from odc_triton.jobs.trainers.grpo_vllm import ShardedVllmGeneration

    case.environment()
    server, which, when = changes.pop("ends")
    refresh, asked = ShardedVllmGeneration.sync_weights, []

    def refreshed(engine: ShardedVllmGeneration) -> None:
        asked.append(engine)
        if when == "generate":
            refresh(engine)
        if len(asked) == 3:  # of the constructor, of the first step
            engine._server._timeout_s = engine.vllm_client._timeout_s = SHORT_S
            if rank == 0:
                os.killpg(server, which)
            dist.barrier()
        if when != "generate":
            refresh(engine)

    args = case.arguments(folder, case.ROWS // world, use_vllm=True, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardedVllmGeneration, "sync_weights", refreshed)
        with pytest.raises(GenerationFailed) as caught:
            ODCGRPOTrainer(case.sharded(start), args=args, **case.given()).train()
    assert len(asked) == 3
    dist.barrier()
    os.killpg(server, signal.SIGCONT)
    return f"{caught.type.__name__}: {caught.value}"


ENDS = [
    (signal.SIGSTOP, "refresh", r".*did not answer POST /start_weight_update within 1.5 s"),
    (signal.SIGSTOP, "generate", r"GenerationFailed: .*did not answer POST /v1/completions within 1.5 s"),
    (signal.SIGKILL, "generate", r"GenerationFailed: .*is unreachable for POST /v1/completions"),
]


def test_a_server_that_ends(tmp_path: Path) -> None:
    """Or hangs: each rank says so, and none waits for ever."""
    start = _saved(tmp_path / "model")
    with vllm_serve(Path(start), tmp_path / "log") as server:
        ends = [(server.process.pid, which, when) for which, when, _ in ENDS]
        runs = [(_failed, str(tmp_path), start, _server_mode(server.address, ends=each)) for each in ends]
        for of_ranks, (_, _, words) in zip(ranks.run_all(2, *runs), ENDS, strict=True):
            for found in of_ranks:
                assert re.match(words, found), found
