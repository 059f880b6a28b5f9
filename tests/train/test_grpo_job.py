"""The job of GRPO with completions that it samples itself: stopping, resuming, lost ranks, rewards that fail."""

from __future__ import annotations

import html
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from odc_triton.jobs.data.tokenizer import load_tokenizer, to_transformers
from odc_triton.jobs.rl.prompts import read_prompts
from odc_triton.jobs.rl.rewards import Rewards
from odc_triton.jobs.rl.transformers_engine import TransformersEngine
from odc_triton.jobs.train import grpo
from odc_triton.jobs.train.grpo import check_before_start
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.grpo_run import GrpoRun
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.prepare import load_any_tokenizer
from odc_triton.plan.order import Mix
from tests.rewards import vowels
from tests.support import jobs, ranks
from tests.support.grpo_case import case, write_prompts
from tests.support.jobs import ENDED, STOPPED, lines
from tests.support.logged import in_tensorboard
from tests.support.vllm_stand_in import vllm_serve

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("grpo"))


def options(folder: Path, out: Path, **changes: Any) -> GrpoOptions:
    return case(
        folder, out=str(out), **{"steps": STEPS, "lr": 1e-3, "prompts_per_rank": 2, "decode_at_once": 3} | changes
    )


def train(rank: int, world: int, wanted: GrpoOptions, fault: str, at: int) -> str:
    """The job on one rank; how it ended. `fault`: what happens to the last rank in step `at`, counted from 0."""
    if rank == world - 1:
        _arm(fault, at)
    (end,) = jobs.train(rank, world, [wanted])
    return end


def _arm(fault: str, at: int) -> None:
    """`fault`: "kill" or "stop", and the phase: rollout, scoring or update."""
    what, phase = fault.split()
    runs: list[GrpoRun] = []

    def striking(method: Callable) -> Callable:
        def struck(*given: Any, **named: Any) -> Any:
            if runs[0].state.step == at:
                os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGTERM)
            return method(*given, **named)

        return struck

    class Noted(GrpoRun):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            runs.append(self)

    grpo.GrpoRun = Noted
    if phase == "rollout":
        TransformersEngine.generate = striking(TransformersEngine.generate)
    elif phase == "scoring":
        Rewards.score = striking(Rewards.score)
    else:
        Noted.step = striking(GrpoRun.step)


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The metrics of a run on two ranks that nothing disturbed, with an evaluation at its end."""
    out = tmp_path_factory.mktemp("whole") / "out"
    watched = {"eval_data": str(folder / "held_out.jsonl"), "eval_samples": 3, "report_to": ("tensorboard",)}
    wanted = options(folder, out, **watched)
    overlapped = replace(wanted, out=str(out.with_name("overlapped")), overlap_rollout="on", report_to=())
    assert jobs.run(2, wanted, overlapped) == [ENDED] * 2
    same(lines(overlapped.out), lines(out))
    _samples_are_those_of_the_evaluation(folder, out)
    return lines(out)


def _samples_are_those_of_the_evaluation(folder: Path, out: Path) -> None:
    """Three of the five held-out prompts, completed by the saved model, each with its reward; also in TensorBoard."""
    from transformers import AutoModelForCausalLM

    every = read_metrics(out / "samples.jsonl")
    shown = [line for line in every if "advantage" in line]
    samples = [line for line in every if "advantage" not in line]
    assert {line["step"] for line in shown} == {1, STEPS}
    assert all(one["prompt"] == other["prompt"] for one, other in pairwise(shown) if one["step"] == other["step"])
    assert all(-2 < line["advantage"] < 2 and isinstance(line["reward"], float) for line in shown)
    page = (out / "report.html").read_text()
    assert all(
        html.escape(line["completion"][:20]) in page for line in shown if not re.search(r"\s", line["completion"])
    )
    held_out = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    assert [(line["step"], line["prompt"]) for line in samples] == [(STEPS, each["prompt"]) for each in held_out[:3]]
    tokenizer = to_transformers(load_tokenizer(folder / "tokenizer.json"))
    prompts = read_prompts(str(folder / "held_out.jsonl"), tokenizer, most_tokens=999)
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    for line, prompt, record in zip(samples, prompts, held_out, strict=False):
        row = torch.tensor([prompt.ids])
        made = model.generate(row, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        text = tokenizer.decode(made[0, len(prompt.ids) :], skip_special_tokens=True)
        assert line["completion"] == text
        assert line["reward"] == pytest.approx(vowels([text], [record["wanted"]])[0])
    scalars, texts = in_tensorboard(out / "tensorboard")
    rewards = [(line["step"], pytest.approx(line["reward"], rel=1e-6)) for line in lines(out)]  # it keeps fp32
    assert scalars["reward"] == rewards
    assert texts["samples/text_summary"][-1].count("\n") == 1 + sum(line["step"] == STEPS for line in every)


def same(found: list[dict], wanted: list[dict]) -> None:
    for one, other in zip(found, wanted, strict=True):
        for name in ("reward", "length", "loss", "grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (one["step"], name)


def test_a_line_has_all_that_a_step_did(whole: list[dict]) -> None:
    wanted = {"reward", "reward_std", "groups_learned", "length", "length_max", "truncated", "ratio", "clipped"}
    wanted |= {"loss", "lr", "grad_norm", "tokens", "idle", "rollout_s", "scoring_s", "sync_s", "update_s", "seconds"}
    wanted |= {"entropy"}
    assert all(wanted <= line.keys() for line in whole)
    assert all(abs(line["ratio"] - 1) < 1e-5 for line in whole), "one update on each rollout, by the policy itself"
    assert {"eval_pass", "eval_reward"} <= whole[-1].keys()


def test_completions_depend_on_no_rank(folder: Path, tmp_path: Path, whole: list[dict]) -> None:
    """One rank takes other prompts than two; the update is the same up to rounding. A function of one turn samples the
    same, also for the evaluation."""
    wanted = options(folder, tmp_path / "out", prompts_per_rank=4)
    function = {"rollout": "tests.rollouts:one_turn", "reward": ("tests.rewards:vowels", "tests.rewards:of_function")}
    watched = {"eval_data": str(folder / "held_out.jsonl")}
    by_function = replace(wanted, out=str(tmp_path / "function"), **function, **watched)
    assert jobs.run(1, wanted, by_function) == [ENDED] * 2
    same(lines(tmp_path / "out"), whole)
    same(lines(tmp_path / "function"), whole)
    for name in ("eval_reward", "eval_length"):
        assert lines(tmp_path / "function")[-1][name] == pytest.approx(whole[-1][name], rel=1e-4)


def test_stopped_and_killed_a_run_goes_on_as_if_it_never_was(folder: Path, tmp_path: Path, whole: list[dict]) -> None:
    """The last rank is killed while it scores, told to stop in an update, and then in a rollout."""
    out = tmp_path / "out"
    watched = {"eval_data": str(folder / "held_out.jsonl"), "resume": "auto"}
    with ranks.start(train, 2, options(folder, out, checkpoint_every=1, **watched), "kill scoring", 1) as job:
        first, second = job.join()
    assert second.signal == signal.SIGKILL
    assert first.error is None, first.error
    assert re.match("(RankLost|MinibatchFailed): .*rank 1 died", first.value)
    assert len(lines(out)) == 1
    wanted = options(folder, out, **watched)
    assert ranks.run(train, 2, wanted, "stop update", 2) == [STOPPED] * 2
    assert len(lines(out)) == 3
    elsewhere = replace(wanted, out=str(tmp_path / "elsewhere"), resume=str(out / "checkpoints" / "step-00000003"))
    assert ranks.run(train, 2, elsewhere, "stop rollout", 3) == [STOPPED] * 2
    assert (tmp_path / "elsewhere" / "checkpoints" / "step-00000003").exists()
    assert ranks.run(train, 2, wanted, "stop rollout", 3) == [STOPPED] * 2
    assert len(lines(out)) == 3, "a rollout that was stopped is no step"
    assert jobs.run(2, wanted) == [ENDED]
    same(lines(out), whole)


def test_nothing_to_learn_adapters_vllm_and_a_reward_that_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch. The reward fails in the second step."""
    start = {"init": None, "model": str(folder / "start"), "steps": 2}
    alike = {"reward": ("tests.rewards:all_alike",), "split_sequences": True, "optimizer": "adamw", "weight_decay": 0.5}
    rows = [json.loads(line) | {"held_out": 0.7} for line in (folder / "held_out.jsonl").read_text().splitlines()]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alike |= {"eval_data": str(tmp_path / "held_out.jsonl")}
    late = {"reward": ("tests.rewards:disturbed",), "checkpoint_every": 1, "checkpoint_background": True}
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    fifth = prompts[Mix((len(prompts),)).order(0, f"prompts {options(folder, tmp_path).seed}")[4]]
    monkeypatch.setenv("ODC_TEST_REWARD", f"raises: {fifth}")
    monkeypatch.setenv("ODC_TEST_STRUCK", str(tmp_path / "struck"))
    engine = {"engine": "vllm-server", "reward": ("tests.rewards:second_token",), "importance": "token_truncate"}
    equal, adapters, failing, raising = (
        options(folder, tmp_path / "equal", **start, **alike),
        options(folder, tmp_path / "adapters", lora_rank=4, kl=0.05, **start | {"lr": 1e-2}),
        options(folder, tmp_path / "failing", **late),
        options(folder, tmp_path / "raising", rollout="tests.rollouts:raising"),
    )
    with vllm_serve() as server:
        served = options(folder, tmp_path / "served", **start, **engine, vllm_server=server.address)
        overlapped = replace(served, out=str(tmp_path / "overlapped"), overlap_rollout="on")
        wanted = [equal, adapters, served, overlapped, failing, raising]
        (*ends, problem, of_rollout), _ = ranks.run(jobs.train, 2, wanted)
    assert ends == [ENDED] * 4

    for line in lines(equal.out):
        assert (line["loss"], line["grad_norm"], line["skipped"], line["groups_learned"]) == (0.0, 0.0, 0, 0.0)
        assert line["reward"] == pytest.approx(0.1)
        assert line["ratio"] is None, "of no token"
    assert lines(equal.out)[-1]["eval_reward"] == pytest.approx(0.7), "by a column of held-out prompts only"
    before, after = (load_file(each / "model.safetensors") for each in (folder / "start", tmp_path / "equal" / "model"))
    for name in after:  # as in TRL, where gradients are zeros
        torch.testing.assert_close(after[name], before[name] * (1 - 0.5 * equal.lr) ** 2, rtol=1e-6, atol=0)

    found = lines(adapters.out)
    assert found[0]["kl"] == pytest.approx(0.0, abs=1e-6), "adapters start as the reference"
    assert found[1]["kl"] > 1e-6
    assert (tmp_path / "adapters" / "adapter" / "adapter_model.safetensors").exists()

    assert [path for path, _ in server.asked].count("/update_weights") == 4, "before each rollout"
    for line in lines(served.out) + lines(overlapped.out):
        assert (line["length"], line["truncated"]) == (3, 0)
        # 1 of the token whose probability it does not give; it is far surer of the others than the policy is.
        assert line["mismatch"] == pytest.approx(0.34, abs=0.02)

    assert problem.startswith("RolloutFailed: ")
    assert "reward tests.rewards:disturbed raised KeyError: 'told to'" in problem
    assert len(lines(failing.out)) == 1
    assert (tmp_path / "failing" / "checkpoints" / "step-00000001" / "manifest.json").exists(), "all ranks know of it"
    assert "rollout tests.rollouts:raising raised KeyError: 'no tool for" in of_rollout.partition("\n")[0]


def test_before_the_ranks_start(folder: Path, tmp_path: Path) -> None:
    """What can be seen without ranks is said without them."""
    check_before_start(options(folder, tmp_path / "out"), 1)
    with pytest.raises(ValueError, match="no_such_module"):
        check_before_start(options(folder, tmp_path / "out", reward=("no_such_module:f",)), 1)
    with pytest.raises(ValueError, match=r"rollout tests.rollouts:none: .* has no none"):
        check_before_start(options(folder, tmp_path / "out", rollout="tests.rollouts:none"), 1)
    with pytest.raises(ValueError, match=r"--rollout is 'tests.rollouts'; give module:function"):
        options(folder, tmp_path / "out", rollout="tests.rollouts")
    with pytest.raises(ValueError, match=r"line 1: the prompt has .* tokens, and 3 fit.*--max-new-tokens"):
        check_before_start(options(folder, tmp_path / "out", token_cap=15), 1)
    dropping = options(folder, tmp_path / "out", token_cap=15, drop_long=True)
    check_before_start(dropping, 1)  # which reads the first few
    with pytest.raises(ValueError, match="has no prompt that fits"):
        read_prompts(str(folder / "prompts.jsonl"), load_any_tokenizer(dropping), most_tokens=3, drop_long=True)
    (tmp_path / "no.jsonl").write_text(json.dumps({"question": "why"}) + "\n")
    with pytest.raises(ValueError, match="needs 'prompt', text or messages; it has 'question'"):
        check_before_start(options(folder, tmp_path / "out", data=str(tmp_path / "no.jsonl")), 1)


def test_a_prompt_over_the_cap(folder: Path, tmp_path: Path) -> None:
    """Split sequences take it as long as its segments fit."""
    longest = max(len(json.loads(line)["prompt"]) for line in (folder / "prompts.jsonl").read_text().splitlines())
    wanted = options(folder, tmp_path / "out", split_sequences=True, token_cap=longest, max_new_tokens=longest)
    check_before_start(wanted, 2)
    check_before_start(replace(wanted, replicas=2), 4)
    for each, ranks_ in ((wanted, 1), (replace(wanted, split_sequences=False), 2)):
        with pytest.raises(ValueError, match=r"the prompt has .* tokens, and 0 fit"):
            check_before_start(each, ranks_)
