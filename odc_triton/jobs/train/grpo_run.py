"""GRPO on one rank: a rollout, its learned completions, and the updates."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from torch import nn

from ...base.errors import RolloutStopped
from ...packs.enable import innermost, takes_branches
from ...packs.loss import NO_ROUTER_LOSS, refuse_router_loss
from ...packs.reference import Reference
from ...plan.cost import CostModel
from ...plan.order import in_passes
from ...plan.planner import Planner, make_plan
from ...plan.samples import Limits, Samples
from ...plan.split import readable_tokens
from ...recurrent.layers import most_cuts_of
from ...sequence.buffers import CUTS
from ...sequence.enable import enable_split
from ...sequence.sums import SampleSums
from ...step import StepReport
from ..rl.generation import CompletionEngine, SamplingOptions, end_tokens_of
from ..rl.importance import Importance
from ..rl.learned import Learned
from ..rl.overlap import HiddenTime, OverlappedRollout, rows_of
from ..rl.policy_gradient import PolicyGradient
from ..rl.policy_loss import LearningRule, PolicyLoss, advantages
from ..rl.prompts import Prompts, completion_seed
from ..rl.rewards import Rewards
from ..rl.rollout import PromptSlot, Rollout, Sampler
from ..rl.turns import RolloutFunction
from .grpo_options import GrpoOptions
from .metrics import Metrics
from .prepare import Prepared
from .run import Run, Sample, shared_counter

Stepped = tuple[Rollout, Learned, StepReport, Metrics]  # the last: seconds


class GrpoRun(Run):
    """Reinforcement learning by GRPO: one step is a rollout and `iterations` updates."""

    measure = "eval_reward"
    more_is_better = True
    bar: ClassVar[dict[str, Any]] = {
        "reward": ("reward", ".3f"),
        "length": ("length", ".0f"),
        "rollout s": ("rollout_s", ".1f"),
        "update s": ("update_s", ".1f"),
        "pass": ("eval_pass", ".0%"),
    }
    options: GrpoOptions

    def __init__(
        self,
        *,
        options: GrpoOptions,
        model: nn.Module,
        prepared: Prepared[Prompts],
        reference: nn.Module | None,
        teacher: nn.Module | None,
        completions: CompletionEngine,
        rewards: Rewards,
        cost: CostModel,
        correction: Importance | None,
    ) -> None:
        """`reference`: the model at the start, sharded, if there is a divergence to it; `teacher`: another one,
        to learn from. `completions` samples; `correction`: the importance weights if it is not the policy.
        """
        refuse_router_loss(model, f"which train grpo leaves out: use ODCGRPOTrainer, or {NO_ROUTER_LOSS}")
        super().__init__(options=options, model=model, prepared=prepared)
        self.correction = correction
        engine, grid = self.engine, self.engine.grid
        self.sampler = Sampler(
            engine,
            completions=completions,
            rewards=rewards,
            counter=shared_counter(options, grid),
            tokenizer=prepared.tokenizer,
            function=None if options.rollout is None else self._function(options.rollout),
            decode=options.decode_at_once,
            stop=lambda: self.stop_signal.signal,
        )
        models = [each for each in (model, reference, teacher) if each is not None]
        able = all(takes_branches(innermost(each)) for each in models)
        self.shares_prefixes = options.share_prefixes == "auto" and able
        split_tokens = shared_tokens = 0
        if options.split_sequences and grid.shards > 1:
            split_tokens = self._split_tokens(cost)
        if self.shares_prefixes and grid.shards > 1:
            shared_tokens = max(split_tokens, _tokens_of_trees(options, self.data.longest))
        over = split_tokens and self.data.longest + options.max_new_tokens > options.token_cap
        # All of them may be that long, but then there is no memory for so many states.
        cuts = min(-(-self.per_step * options.generations // grid.replicas), 64) if over else 0
        cuts = most_cuts_of(models, cuts, options.split_cuts)
        if split_tokens or shared_tokens:
            try:
                for each in models:
                    enable_split(each, max(split_tokens, shared_tokens), cuts=cuts or CUTS)
            except NotImplementedError:  # of a compiled model, or of one with other attention
                if split_tokens:
                    raise
                shared_tokens = 0
        needs_sums = options.loss == "gspo" or (correction is not None and correction.is_of_sequences)
        segments: SampleSums | None = None
        if needs_sums and (split_tokens or shared_tokens):
            segments = SampleSums(model, samples=self.per_step * options.generations)
        self.reference = None if reference is None else Reference(reference, model)
        self.teacher = self.teacher_of(teacher)
        self.cost = cost
        limits = Limits(
            ranks=grid.world,
            token_cap=options.token_cap,
            replicas=grid.replicas,
            split_tokens=split_tokens,
            shared_tokens=shared_tokens,
            split_cuts=cuts,
        )
        self.planner = Planner(limits=limits)
        self.end_tokens = end_tokens_of(model, prepared.tokenizer)
        high = options.clip if options.clip_high is None else options.clip_high
        self.objective = partial(
            PolicyGradient,
            rule=PolicyLoss(loss=options.loss, low=options.clip, high=high, kl=options.kl),
            temperature=options.temperature,
            reference=self.reference,
            teacher=self.teacher,
            correction=correction,
            segments=segments,
        )
        self.rule = LearningRule(
            loss=options.loss,
            rows=self.per_step * options.generations,
            most_tokens=options.max_new_tokens,
            mask_truncated=options.mask_truncated,
            keep_all=len(models) > 1,
        )
        self.overlapped: OverlappedRollout | None = None
        if options.overlaps:
            self.overlapped = OverlappedRollout(
                self.sampler, self.planner, cost, shares_prefixes=self.shares_prefixes, scale=options.scale_rewards
            )
            engine.register(self.overlapped)

    def _split_tokens(self, cost: CostModel) -> int:
        """Of a rank, the most tokens that others may read. Raises ValueError if the longest sample can't be split."""
        options, shards, replicas = self.options, self.engine.grid.shards, self.engine.grid.replicas
        longest, limits = self.data.longest, {"token_cap": options.token_cap, "cost": cost}
        # A function of rollouts may change a prompt.
        prompts = [longest if options.rollout else len(each.ids) for each in self.data]
        # A step that goes across the end of a pass may have a prompt twice.
        lengths = [each + options.max_new_tokens for each in prompts for _ in range(2 * options.generations)]
        samples = -(-self.per_step * options.generations // replicas)
        tokens = options.split_tokens or readable_tokens(lengths, ranks=shards, samples=samples, **limits)
        number, length = prompts.index(longest), longest + options.max_new_tokens
        limits = Limits(ranks=shards, token_cap=options.token_cap, split_tokens=tokens)
        make_plan(Samples.of(limits.checked([length]), cost, names=[number]), limits)  # raises if it can't be split
        return tokens

    def _function(self, name: str) -> RolloutFunction:
        vocabulary = innermost(self.model).config.get_text_config().vocab_size
        return RolloutFunction(name, longest=self.data.longest, vocabulary=vocabulary)

    def train_step(self) -> Metrics | None:
        start_s, step = time.monotonic(), self.state.step
        self.sampler.completions.sync(self.model)
        synced_s = time.monotonic()
        stepped = self._in_phases() if self.overlapped is None else self._overlapping()
        if isinstance(stepped, int):
            self.stop = stepped
            return None
        made, batch, report, seconds = stepped
        if (every := self.options.show_every) and (step % every == 0 or step + 1 == self.steps):
            self.samples += self._shown(made)
        metrics = {"epoch": (step + 1) * self.per_step / len(self.mix), "loss": report.loss}
        metrics |= self._of_rollout(made) | self._of_update(report.sums)
        seconds = {"sync_s": synced_s - start_s, "scoring_s": made.scoring_s, **seconds}
        return self.stepped(start_s, batch.tokens, metrics, **seconds)

    def _in_phases(self) -> Stepped | int:
        """A rollout, then the updates; or the signal for which the ranks stop."""
        options = self.options
        made = self.sampler.roll_out(self._slots(), self._sampling(options.temperature))
        if isinstance(made, int):
            return made
        batch = Learned.of(made, self.rule, options.scale_rewards)
        update_s, loss = time.monotonic(), 0.0
        limits, shares = self.planner.limits, self.shares_prefixes
        rows = rows_of(batch, [*batch.samples], limits, self.cost, shares_prefixes=shares)
        own = self.planner.packs(rows, self.engine.rank)
        objective = self.objective(batch=batch)
        for _ in range(options.iterations):
            report = self.step(own, objective, collate=objective.collate)
            loss += report.loss / options.iterations
            if self.was_skipped:
                break
        seconds = {"rollout_s": made.rollout_s, "update_s": time.monotonic() - update_s}
        return made, batch, replace(report, loss=loss), seconds

    def _overlapping(self) -> Stepped | int:
        """The update while others still sample; or the signal for which the ranks stop."""
        start_s, batch, overlapped = time.monotonic(), Learned(rule=self.rule), self.overlapped
        overlapped.open(self._slots(), self._sampling(self.options.temperature), batch)
        objective, hidden = self.objective(batch=batch), HiddenTime(overlapped)
        try:
            report = self.step(overlapped, objective, collate=objective.collate, parts=[hidden])
        except RolloutStopped as stopped:
            return stopped.signal
        rollout_s, _ = overlapped.seconds()
        update_s = time.monotonic() - start_s - rollout_s
        seconds = {"rollout_s": rollout_s, "update_s": update_s, "hidden_s": hidden.mean_s}
        return overlapped.rollout(), batch, report, seconds

    def _slots(self) -> list[PromptSlot]:
        """The step's prompts."""
        options, step = self.options, self.state.step
        chosen = in_passes(self.mix, step, self.per_step, seed=f"prompts {options.seed}")
        return [
            PromptSlot(
                prompt=self.data[index],
                seeds=[completion_seed(options.seed, step, place, n) for n in range(options.generations)],
                columns=self.data.columns,
            )
            for place, index in enumerate(chosen)
        ]

    def _sampling(self, temperature: float) -> SamplingOptions:
        return SamplingOptions(
            temperature=temperature, max_new_tokens=self.options.max_new_tokens, end_tokens=self.end_tokens
        )

    def evaluate(self) -> Metrics:
        """One greedy completion of each held-out prompt. Empty if the ranks are asked to stop."""
        of = self.evaluation
        slots = [PromptSlot(prompt=prompt, seeds=[0], columns=of.columns) for prompt in of]
        self.sampler.completions.sync(self.model)
        made = self.sampler.roll_out(slots, self._sampling(0.0))
        self.idle.restart()
        if isinstance(made, int):
            self.stop = made
            return {}
        rewards = made.totals.flatten()
        lengths = [sum(one.own) for (one,) in made.sampled]
        self.samples += [self._sample(made, place) for place in range(len(slots))[: self.options.eval_samples]]
        metrics = {"eval_length": sum(lengths) / len(lengths)}
        if self.options.reward:
            metrics["eval_reward"] = rewards.nanmean().item()
            metrics["eval_pass"] = (rewards >= self.options.pass_reward).double().mean().item()
        return metrics

    def _shown(self, made: Rollout) -> list[Sample]:
        """Of the step's first prompt the completions of most and least advantage, with it."""
        found = advantages(made.totals, self.options.scale_rewards)[0].tolist()
        numbers = dict.fromkeys((found.index(max(found)), found.index(min(found))))
        return [self._sample(made, 0, number) | {"advantage": found[number]} for number in numbers]

    def _sample(self, made: Rollout, place: int, number: int = 0) -> Sample:
        """A completion of the prompt at `place`, with its rewards; NaN where no function applied."""

        def decoded(ids: list[int]) -> str:
            return self.sampler.tokenizer.decode(ids, skip_special_tokens=True)

        one = made.sampled[place][number]
        scores = dict(zip(self.sampler.rewards.names, made.rewards[:, place, number].tolist(), strict=True))
        return {
            "prompt": decoded(one.prompt or made.slots[place].prompt.ids),
            "completion": decoded(one.ids),
            **({"reward": made.totals[place, number].item()} if scores else {}),
            **({f"rewards/{name}": score for name, score in scores.items()} if len(scores) > 1 else {}),
            "ended": one.ended,
        }

    def _of_rollout(self, made: Rollout) -> Metrics:
        rewards = made.totals
        flat = [one for group in made.sampled for one in group]
        lengths = [sum(one.own) for one in flat]
        metrics = {
            "length": sum(lengths) / len(lengths),
            "length_max": max(lengths),
            "truncated": sum(not one.ended for one in flat) / len(flat),
        }
        if self.options.reward:
            metrics["reward"] = rewards.nanmean().item()
            known = rewards[~rewards.isnan()]
            metrics["reward_std"] = known.std(correction=0).item() if len(known) else math.nan
            metrics["groups_learned"] = (advantages(rewards, "none") != 0).any(1).double().mean().item()
        if len(self.options.reward) > 1:
            for name, scores in zip(self.sampler.rewards.names, made.rewards, strict=True):
                metrics[f"rewards/{name}"] = scores.nanmean().item()
        return metrics

    def _of_update(self, sums: Mapping[str, float]) -> Metrics:
        """Means over the tokens that were computed; of no tokens NaN."""
        names = ["entropy", "ratio", "clipped"]
        names += ["kl"] * (self.reference is not None) + ["mismatch"] * (self.correction is not None)
        names += ["divergence"] * (self.teacher is not None)
        return {name: sums[name] / sums["tokens"] if sums.get("tokens") else math.nan for name in names}

    def close(self) -> None:
        self.sampler.completions.close()
        self.sampler.rewards.close()


def _tokens_of_trees(options: GrpoOptions, prompt: int) -> int:
    """Of a rank, the most tokens that others read where a prompt's completions lie on several ranks; 0: on one.

    `prompt`: the longest. Of three or more a rank whole trees are as even, unless one does not fit a microbatch.
    """
    if options.prompts_per_rank > 2 and prompt + options.generations * options.max_new_tokens <= options.token_cap:
        return 0
    return prompt + min(options.max_new_tokens, prompt // 2)  # and a part of a completion, which is cut too
