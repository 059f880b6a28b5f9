"""GRPO's step on ranks against TRL's own loss on one process, with recorded completions, and the job as a whole."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.balance import CostModel
from odc_triton.jobs.data.tokenizer import read_tokenizer
from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.prompts import completion_seed, read_prompts
from odc_triton.jobs.rl.turns import TurnEngine
from odc_triton.jobs.train import grpo
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.packs import collate
from odc_triton.plan import relatives
from odc_triton.plan.order import Mix
from tests.rewards import vowels
from tests.rollouts import turns
from tests.support import ranks, slow
from tests.support.grpo_case import Recorded, case, trl_advantages, trl_loss, write_prompts
from tests.support.models import tie_in_config
from tests.support.planned import split
from tests.support.sft_case import VOCABULARY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of seven prompts, so that a step of four goes across the end of a pass. With a teacher/ of another width."""
    folder = write_prompts(tmp_path_factory.mktemp("grpo"), prompts=7)
    torch.manual_seed(4)
    config = AutoConfig.from_pretrained(folder, hidden_size=48, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    return folder


def train(rank: int, world: int, jobs: list[GrpoOptions]) -> list[int]:
    """Of each job the branches that this rank computed."""
    grpo._engine = lambda wanted, *_: Recorded(
        VOCABULARY,
        elsewhere=wanted.engine != "transformers",
        remotely=wanted.engine == "vllm-server",
        near=wanted.importance.startswith("sequence"),
    )
    counts, make = [], collate._collate

    def counted(*given: object) -> dict:
        pack = make(*given)
        assert pack["input_ids"].numel() <= wanted.token_cap
        counts[-1] += sum(each is not None and each.parent is not None for each in pack.get("segments", ()))
        return pack

    collate._collate = counted
    with mock.patch("odc_triton.jobs.train.outcome.can_draw", return_value=False):
        for wanted in jobs:
            relatives.LEAST_SHARED = 99 if "too short" in wanted.out else 4  # prompts here are short
            counts.append(0)
            grpo.train_grpo(wanted)
    return counts


RETURNED = ("prompt_ids", "completion_ids", "logprobs", "env_mask")


def sampled(request: Request, wanted: GrpoOptions, options: SamplingOptions) -> list[Sampled]:
    """The completions of one prompt, by the rollout function if there is one."""
    engine = Recorded(VOCABULARY, near=wanted.importance.startswith("sequence"))
    if wanted.rollout is None:
        return engine.generate([request], options)[0]
    made = turns(request.seeds, TurnEngine(engine, [request], options, None))
    return [
        Sampled(
            ids=ids,
            logps=[math.nan if each is None else each for each in logps],
            mask=mask,
            prompt=prompt,
            ended=ids[-1] in options.end_tokens,
        )
        for prompt, ids, logps, mask in zip(*map(made.get, RETURNED), strict=True)
    ]


def divergences(
    model: nn.Module, teacher: nn.Module, rows: list[tuple[list[int], Sampled]], wanted: GrpoOptions
) -> list[torch.Tensor]:
    """Of each completion's own tokens."""
    with mock.patch.dict(os.environ, TRL_EXPERIMENTAL_SILENCE="1"):
        from trl.experimental.gkd import GKDTrainer

    found, how = [], {"beta": wanted.teacher_beta, "temperature": wanted.teacher_temperature, "reduction": "none"}
    for prompt, one in rows:
        ids, own = torch.tensor([prompt + one.ids]), torch.tensor(one.own, dtype=torch.bool)
        with torch.no_grad():
            theirs = teacher(input_ids=ids).logits[:, len(prompt) - 1 : -1][:, own]
        logits = model(input_ids=ids, use_cache=False).logits[:, len(prompt) - 1 : -1][:, own]
        found.append(GKDTrainer.generalized_jsd_loss(logits, theirs, **how).sum(-1)[0])
    return found


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """By the model's own names, which Nemotron-H's files don't have."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def plain(
    wanted: GrpoOptions, world: int
) -> tuple[list[float], dict[str, torch.Tensor], list[list[int]], list[float], list[float]]:
    """The losses and final weights of the same job on one process: plain torch, SGD, TRL's advantages and loss.

    Also the lengths of each step's completions, with their prompts, their mean number of sampled tokens, and the
    divergence in each iteration, if there is one.
    """
    tokenizer = read_tokenizer(wanted.tokenizer)
    prompts = read_prompts(wanted.data[0], tokenizer, most_tokens=wanted.token_cap * world)
    model = AutoModelForCausalLM.from_pretrained(wanted.model)
    reference = AutoModelForCausalLM.from_pretrained(wanted.model) if wanted.kl else None
    teacher = AutoModelForCausalLM.from_pretrained(wanted.teacher) if wanted.teacher else None
    optimizer = torch.optim.SGD(model.parameters(), lr=wanted.lr)
    per_step = wanted.prompts_per_rank * world
    ends = (tokenizer.eos_token_id,)
    options = SamplingOptions(temperature=1.0, max_new_tokens=wanted.max_new_tokens, end_tokens=ends)
    passes = (Mix((len(prompts),)).order(each, f"prompts {wanted.seed}") for each in range(wanted.steps))
    in_order = itertools.chain.from_iterable(passes)
    losses, lengths, means, diverged, masked, outside = [], [], [], [], 0, 0
    for step in range(wanted.steps):
        chosen = [prompts[index] for index in itertools.islice(in_order, per_step)]
        rows, rewards = [], []
        for place, prompt in enumerate(chosen):
            seeds = [completion_seed(wanted.seed, step, place, n) for n in range(wanted.generations)]
            group = sampled(Request(ids=prompt.ids, seeds=seeds), wanted, options)
            texts = [tokenizer.decode(one.ids, skip_special_tokens=True) for one in group]
            wanted_texts = [prompt.columns["wanted"]] * len(texts)
            rewards.append(vowels(texts, wanted_texts) if wanted.reward else [0.0] * len(texts))
            rows += [(one.prompt or prompt.ids, one) for one in group]
        gained = trl_advantages(torch.tensor(rewards, dtype=torch.float64), wanted.scale_rewards)
        masked += sum(not one.ended and gain != 0 for (_, one), gain in zip(rows, gained.flatten(), strict=True))
        outside += sum(one.own.count(0) for _, one in rows)
        old, of_step = None, 0.0
        for _ in range(wanted.iterations):
            loss, found, kl = trl_loss(model, rows, gained, wanted, old=old, reference=reference)
            old = old or found
            if teacher is not None:
                apart = divergences(model, teacher, rows, wanted)
                means_of_rows = torch.stack([each.mean() for each in apart])
                of_teacher = torch.cat(apart).mean() if wanted.loss == "dapo" else means_of_rows.mean()
                loss = (1 - wanted.teacher_weight) * loss + wanted.teacher_weight * of_teacher
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), wanted.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            of_step += loss.item() / wanted.iterations
            diverged += kl
        if teacher is not None:  # of the last iteration
            diverged.append(torch.cat(apart).mean().item())
        losses.append(of_step)
        lengths.append([len(prompt) + len(one.ids) for prompt, one in rows])
        means.append(sum(sum(one.own) for _, one in rows) / len(rows))
    assert outside or not wanted.rollout, "no token would come from outside"
    assert masked or not wanted.mask_truncated, "no truncated completion would have taught something"
    return losses, model.state_dict(), lengths, means, diverged


SPLIT = {"split_sequences": True, "token_cap": 240, "split_tokens": 120, "max_new_tokens": 150, "prompts_per_rank": 1}
SPLIT |= {"seed": 3, "generations": 2}
MASKED = {"mask_truncated": True, "max_new_tokens": 6, "clip_norm": 1e9}
REMOTE = {"engine": "vllm-server", "vllm_server": "http://127.0.0.1:1", "importance": "token_truncate"}
ELSEWHERE = {"engine": "vllm-colocate", "importance": "token_truncate", "clip_norm": 1e9, "lr": 30.0}
OVERLAPPED = {"overlap_rollout": "on"}
OVER_THE_CAP = SPLIT | OVERLAPPED | {"token_cap": 120, "split_tokens": 240, "kl": 0.05}
CASES = {
    "dapo twice": {"iterations": 2, "clip": 0.01},
    "dapo, split": SPLIT,
    # Not clipped, which would hide a factor of all gradients.
    "grpo by batch, masked": MASKED | {"loss": "grpo", "scale_rewards": "batch", "lr": 0.1},
    "dr_grpo, no scale, kl": {"loss": "dr_grpo", "scale_rewards": "none", "kl": 0.1, "lr": 10.0},
    "gspo twice, temperature": {"loss": "gspo", "iterations": 2, "clip": 0.001, "temperature": 0.7},
    "cispo twice, fused head": {"loss": "cispo", "iterations": 2, "clip_high": 1.001, "fused_head": True},
    "dapo, too short to share, overlapped": OVERLAPPED | {"token_cap": 60},
    "teacher": OVERLAPPED | {"reward": (), "teacher": "teacher"},
    "gspo, split, other engine": SPLIT | ELSEWHERE | {"loss": "gspo", "importance_cap": 0.02},
    "grpo, split, other engine": SPLIT
    | {"loss": "grpo", "engine": "vllm-colocate", "importance": "sequence_mask", "importance_cap": 1.2},
    "dapo, over the cap, overlapped": OVER_THE_CAP,
}
MORE = {
    "teacher, rewards": {"teacher": "teacher", "teacher_weight": 0.4, "teacher_beta": 1.0, "teacher_temperature": 1.5},
    "teacher, split": SPLIT | {"reward": (), "teacher": "teacher", "gradient_checkpointing": True},
    "kl, tied by the config alone": {"kl": 0.1, "model": "tied"},
    "dapo, nothing shared": {"share_prefixes": "off"},
    "gspo, overlapped": OVERLAPPED | MASKED | {"loss": "gspo"},
    "dapo, overlapped, remote": OVERLAPPED | REMOTE,
}
# Their packs compute a prompt for each completion.
UNSHARED = {"dapo, nothing shared", "dapo, too short to share, overlapped", "dapo, split over replicas"}
# With this seed both replicas split a sample in the first step.
LONG = {"token_cap": 256, "split_tokens": 200, "max_new_tokens": 210, "seed": 18, "generations": 2}
# With tokens from outside: see tests/rollouts.py.
TURNS = {
    "turns, dapo, split": SPLIT | {"seed": 36},
    "turns, grpo by batch, masked": CASES["grpo by batch, masked"] | {"max_new_tokens": 12},
    "turns, other engine": ELSEWHERE,
}
REPLICAS = {
    "dapo, split over replicas": SPLIT | LONG | {"replicas": 2, "share_prefixes": "off"},
    "dapo, replicas": {"replicas": 2, "prompts_per_rank": 1},
    "dapo, over the cap, replicas": OVER_THE_CAP | {"replicas": 2},
}


@pytest.mark.parametrize(
    ("cases", "world"),
    [(CASES | TURNS, 2), slow(REPLICAS, 4), slow(MORE, 2)],
    ids=["2 ranks", "2 x 2 ranks", "more"],
)
def test_steps_are_trls(folder: Path, tmp_path: Path, cases: dict[str, dict], world: int) -> None:
    """Losses and weights after two steps of SGD, of all cases in one launch."""
    if sys.version_info < (3, 11):
        pytest.skip("TRL needs Python 3.11")
    start = folder / "start"
    usual = {
        "init": None,
        "model": str(start),
        "steps": 2,
        "optimizer": "sgd",
        "prompts_per_rank": 4 // min(world, 2),
        "lr": 1.0,
    }
    function = {"rollout": "tests.rollouts:turns"}
    changed = {name: changes | function if name.startswith("turns") else changes for name, changes in cases.items()}
    for name, changes in changed.items():
        if "teacher" in changes:
            changed[name] = changes | {"teacher": str(folder / "teacher")}
        if "model" in changes:  # the same weights as of start/
            shutil.copytree(start, tmp_path / "tied")
            tie_in_config(tmp_path / "tied")
            changed[name] = changes | {"model": str(tmp_path / "tied")}
    jobs = {name: case(folder, out=str(tmp_path / name), **usual | changes) for name, changes in changed.items()}
    branches = dict(zip(jobs, map(sum, zip(*ranks.run(train, world, [*jobs.values()]), strict=True)), strict=True))
    # Of gspo's few learned completions, those that come together make a pack: by chance none shares a prompt. Nor do
    # few that are cut.
    by_chance = {name for name in jobs if name.endswith("gspo, overlapped") or "over the cap" in name}
    unshared = {name for name, count in branches.items() if count == 0}
    assert unshared - by_chance == UNSHARED & jobs.keys()
    first = saved(start)
    for name, wanted in jobs.items():
        losses, weights, lengths, means, diverged = plain(wanted, world)
        if "over the cap" in name:
            assert max(map(max, lengths)) > wanted.token_cap
        if wanted.split_sequences:
            cost = CostModel.from_config(AutoConfig.from_pretrained(start))
            how = {"ranks": world, "token_cap": wanted.token_cap, "tokens": wanted.split_tokens or 999, "cost": cost}
            how["replicas"] = wanted.replicas or 1
            assert any(split(of_step, **how).split for of_step in lengths), "no sample would be cut"
        found = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [line["loss"] for line in found] == pytest.approx(losses, rel=1e-4, abs=2e-6), name
        assert [line["length"] for line in found] == pytest.approx(means)
        apart = "divergence" if wanted.teacher else "kl"
        assert [line[apart] for line in found if apart in line] == pytest.approx(diverged, rel=1e-3, abs=1e-7), name
        made = saved(tmp_path / name / "model")
        moved = sum((weights[n] - first[n]).square().sum() for n in made).sqrt()
        apart = sum((weights[n] - made[n]).square().sum() for n in made).sqrt()
        assert moved > 0.01, f"{name}: the steps must change the weights for the comparison to say something"
        assert apart / moved < 1e-4, f"{name}, as a part of what the steps changed: additions in another order, fp32"
        for n, value in made.items():
            own = (weights[n] - first[n]).norm()
            assert (weights[n] - value).norm() <= 1e-3 * own + 1e-5 * moved, f"{name}: {n}"
        if "twice" in name:
            clipped = [line["clipped"] for line in found[1:] if line["clipped"] is not None]  # None: of no token
            assert clipped, name
            assert min(clipped) > 0, name
