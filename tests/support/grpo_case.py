"""A small job of GRPO: prompts of real text, a reward, an engine of recorded completions, and TRL's own loss."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.train.grpo_options import GrpoOptions
from tests.support.deadlines import LONG_S
from tests.support.sft_case import write_case

VOWELS = "tests.rewards:vowels"


def write_prompts(folder: Path, *, prompts: int = 12, config: dict | None = None) -> Path:
    """Adds to `write_case` prompts.jsonl and held_out.jsonl, with a column `wanted`, and a model, start/."""
    write_case(folder, config=config)
    texts = [json.loads(line)["prompt"] for line in (folder / "data.jsonl").read_text().splitlines()]
    for name, some in (("prompts", texts[:prompts]), ("held_out", texts[prompts : prompts + 5])):
        lines = [json.dumps({"prompt": text, "wanted": "aeiou"[: 1 + n % 5]}) for n, text in enumerate(some)]
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder / "start")
    return folder


def case(folder: Path, **changes: object) -> GrpoOptions:
    """Options of a run on what `write_prompts` wrote: four prompts per step, three completions of each; in phases."""
    wanted = {
        "data": str(folder / "prompts.jsonl"),
        "init": str(folder / "config.json"),
        "tokenizer": str(folder / "tokenizer.json"),
        "out": str(folder / "out"),
        "reward": (VOWELS,),
        "steps": 3,
        "prompts_per_rank": 4,
        "generations": 3,
        "max_new_tokens": 12,
        "token_cap": 128,
        "lr": 1e-2,
        "schedule": "constant",
        "warmup_steps": 0,
        "timeout_minutes": LONG_S / 60,
        "overlap_rollout": "off",
    }
    return GrpoOptions(**wanted | changes)


class Recorded:
    """Completions that depend on prompt and seed only: of 1 to `max_new_tokens` tokens, some without an end.

    `near`: with log-probabilities that are near those of `write_prompts`' model.
    """

    def __init__(self, vocabulary: int, *, elsewhere: bool = False, remotely: bool = False, near: bool = False) -> None:
        self.vocabulary, self.samples_elsewhere, self.samples_remotely = vocabulary, elsewhere, remotely
        self.near = near

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[list[Sampled]]:
        return [[self._one(seed, options) for seed in request.seeds] for request in requests]

    def _one(self, seed: int, options: SamplingOptions) -> Sampled:
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(1, options.max_new_tokens + 1, (), generator=generator))
        ids = torch.randint(4, self.vocabulary, (length,), generator=generator).tolist()
        ended = length < options.max_new_tokens
        if ended:
            ids[-1] = options.end_tokens[0]
        logps = torch.rand(length, generator=generator).log()
        if self.near:
            logps = 0.02 * (logps + 1) - math.log(self.vocabulary)
        return Sampled(ids=ids, logps=logps.tolist(), ended=ended)

    def sync(self, model: nn.Module) -> None:
        pass

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def trl_advantages(rewards: Tensor, scale: str) -> Tensor:
    """[prompts, completions], as TRL's trainer computes them, for rewards without NaN."""
    deviation = rewards.std(1, keepdim=True) if scale == "group" else rewards.std()
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred if scale == "none" else centred / (deviation + 1e-4)


def trl_loss(
    model: nn.Module,
    rows: Sequence[tuple[list[int], Sampled]],
    advantage: Tensor,
    options: GrpoOptions,
    *,
    old: list[Tensor] | None = None,
    reference: nn.Module | None = None,
) -> tuple[Tensor, list[Tensor], list[float]]:
    """TRL's `_compute_loss` of (prompt, completion) rows on one process, padded; each row's log-probabilities; and its
    metric of the divergence, if there is one.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    width = max(len(one.ids) for _, one in rows)

    def padded(values: list[Any], fill: float = 0.0) -> Tensor:
        return torch.stack([torch.cat([torch.as_tensor(v), torch.full((width - len(v),), fill)]) for v in values])

    def log_probs(model: nn.Module) -> list[Tensor]:
        found = []
        for prompt, one in rows:
            logits = model(input_ids=torch.tensor([prompt + one.ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            every = (logits.float() / options.temperature).log_softmax(-1)
            found.append(every.gather(1, torch.tensor(one.ids)[:, None])[:, 0])
        return found

    own = log_probs(model)
    mask = padded([torch.full((len(o.ids),), float(o.ended or not options.mask_truncated)) for _, o in rows])
    tool_mask = padded([torch.tensor(one.own) for _, one in rows], 1)
    elsewhere = options.engine != "transformers"
    inputs = {
        "prompt_ids": torch.zeros(len(rows), 0),
        "prompt_mask": torch.zeros(len(rows), 0),
        "completion_ids": torch.zeros(len(rows), width),
        "completion_mask": mask,
        "advantages": advantage.flatten().float(),
        "num_items_in_batch": (mask * tool_mask).sum(),
        "tool_mask": tool_mask,
    }
    if elsewhere:
        then = padded(old or [each.detach() for each in own])
        apart = ((then - padded([one.logps for _, one in rows])) * mask * tool_mask).nan_to_num(nan=0.0)
        apart = apart.sum(1, keepdim=True) if options.importance.startswith("sequence") else apart
        ratio, most = apart.exp(), options.importance_cap
        bounded = most if options.importance.endswith("truncate") else 0.0
        inputs["importance_sampling_ratio"] = ratio.masked_fill(ratio > most, bounded)
    if old is not None:
        inputs["old_per_token_logps"] = padded(old)
    if reference is not None:
        with torch.no_grad():
            inputs["ref_per_token_logps"] = padded(log_probs(reference))
    sequence = options.loss == "gspo"
    ours = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded(own), torch.zeros(len(rows), width), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if sequence else "token",
        beta=options.kl,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type="grpo" if sequence else options.loss,
        epsilon_low=options.clip,
        epsilon_high=options.clip if options.clip_high is None else options.clip_high,
        use_vllm=elsewhere,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=options.max_new_tokens,
        _entropy_bonus_enabled=False,
        _metrics={"train": _Metrics()},
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda value, **_: value, gather=lambda value: value),
    )
    loss = GRPOTrainer._compute_loss(ours, model, inputs)
    return loss, [each.detach() for each in own], ours._metrics["train"]["kl"]


class _Metrics(dict):
    def __missing__(self, name: str) -> list[float]:
        self[name] = []
        return self[name]
