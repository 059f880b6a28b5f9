"""Options of GRPO. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..options.options import REQUIRED, flag, option, parts_of
from ..rl.named_rewards import NAMES
from .run_options import RunOptions

_FUNCTION = re.compile(r"[\w.]+:\w+")


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(RunOptions):
    """Reinforcement learning by GRPO."""

    data: tuple[str, ...] = option(
        REQUIRED,
        "prompts: a file, folder or hub id with `prompt`, text or messages, and columns for the reward "
        "functions; repeatable",
    )
    steps: int | None = option(None, "steps, each with a rollout; by default one pass over the prompts", group="Steps")
    lr: float = option(1e-6, "peak learning rate; Muon's is scaled to match AdamW's")

    prompts_per_rank: int = option(4, "prompts per rank and step, on average", group="Steps")
    generations: int = option(8, "completions of each prompt")
    iterations: int = option(1, "optimizer steps on each rollout")
    overlap_rollout: Literal["auto", "on", "off"] = option(
        "auto",
        "auto: train on completions while others are still sampled, with the same update, unless an option needs all "
        "of them first; on: refuse such options; off: sample all completions, then update",
    )
    share_prefixes: Literal["auto", "off"] = option(
        "auto", "auto: compute a prompt once for its completions, on one rank or for several; off: for each of them"
    )
    show_every: int = option(
        10,
        "steps between two prompts that are shown with their best and worst completion, on the console and in "
        "samples.jsonl; 0: none",
    )
    drop_long: bool = option(False, "leave out prompts that don't fit --token-cap together with their completions")
    eval_samples: int = option(
        0, "held-out completions to write to samples.jsonl at each evaluation", group="Evaluation"
    )
    pass_reward: float = option(1.0, "least reward that passes a prompt in evaluation, which decodes greedily")

    reward: tuple[str, ...] = option(
        (),
        "accuracy: the answer, in a box or after #### or 'answer is', is that of the column `answer` or `solution`; "
        "format: <think>…</think>, then an answer; length: 0, down to -1 near --max-new-tokens; or module:function of "
        "a reward f(prompts, completions, **columns) -> numbers; "
        "repeatable, or with commas; needed without --teacher",
        group="Rewards",
    )
    reward_weight: tuple[float, ...] = option((), "weight of each --reward, in their order; repeatable; 1 by default")
    reward_timeout_s: float = option(60.0, "seconds that a reward function may take for one batch of completions")
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "divide advantages by the standard deviation of a prompt's rewards, of all rewards, or not"
    )

    max_new_tokens: int = option(512, "most tokens of a completion", group="Rollout")
    temperature: float = option(1.0, "sampling temperature")
    rollout: str | None = option(
        None,
        "module:function that makes the completions in any number of turns: f(prompts, engine), as TRL's rollout_func",
    )
    decode_at_once: int = option(
        64,
        "most completions that a rank decodes together, but at least those of one prompt; fewer balance ranks better",
    )
    engine: Literal["transformers", "vllm-server", "vllm-colocate"] = option(
        "transformers",
        "what samples. transformers: the sharded model itself; vllm-server: a running vLLM; vllm-colocate: a vLLM in "
        "the ranks' processes. vLLM gets the weights before each rollout",
    )
    vllm_server: str | None = option(None, "address of a running vLLM server, such as http://127.0.0.1:8000")
    vllm_memory: float = option(0.3, "with vllm-colocate: share of a GPU's memory for vLLM")
    importance: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = option(
        "sequence_mask",
        "with vLLM: the ratio of the policy's to vLLM's probability, of each token or of the whole completion, "
        "corrects the loss; above the cap it is cut (truncate), or the loss is 0 (mask)",
    )
    importance_cap: float = option(3.0, "with vLLM: the largest such ratio")

    loss: Literal["dapo", "grpo", "dr_grpo", "gspo", "cispo"] = option(
        "dapo",
        "as in TRL. dapo: mean over all tokens; grpo: mean over each completion's tokens, then over completions; "
        "dr_grpo: sum over tokens, divided by the largest possible number; gspo: grpo with whole completions' ratios; "
        "cispo: dapo weighted by a clipped ratio",
        group="Loss",
    )
    clip: float = option(0.2, "how far a ratio may be below 1 before it is clipped")
    clip_high: float | None = option(None, "how far it may be above 1, by default --clip; cispo: the largest ratio")
    kl: float = option(0.0, "weight of the KL divergence from the initial model; 0: no reference model")
    mask_truncated: bool = option(False, "ignore completions that were cut at --max-new-tokens")

    job: ClassVar[str] = "grpo"
    per_rank: ClassVar[str] = "prompts_per_rank"
    shortens: ClassVar[str] = "--drop-long, or lower --max-new-tokens"
    free: ClassVar[frozenset[str]] = RunOptions.free | {
        *("share_prefixes", "eval_samples", "show_every", "decode_at_once"),
        *("reward_timeout_s", "vllm_server", "vllm_memory"),
    }
    adjustable: ClassVar[frozenset[str]] = RunOptions.adjustable | {
        *("temperature", "clip", "clip_high", "importance_cap", "mask_truncated", "pass_reward", "reward_weight"),
    }
    positive: ClassVar[tuple[str, ...]] = (
        *(*RunOptions.positive, "reward_timeout_s", "generations", "max_new_tokens", "temperature"),
        *("decode_at_once", "importance_cap", "clip", "clip_high", "iterations"),
    )
    not_negative: ClassVar[tuple[str, ...]] = (*RunOptions.not_negative, "kl", "eval_samples", "show_every")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "reward", parts_of(self.reward))
        if not 0 < self.vllm_memory < 1:
            raise ValueError(f"--vllm-memory is {self.vllm_memory}; it must be between 0 and 1")
        if not self.reward and self.teacher is None:
            raise ValueError(
                f"--reward is missing: give {', '.join(NAMES)} or module:function, as in --reward my_rewards:exact, "
                f"or a --teacher"
            )
        if self.teacher is not None and bool(self.reward) != (self.teacher_weight < 1):
            what = ", ".join(self.reward) or "missing"
            raise ValueError(
                f"--reward is {what} and --teacher-weight is {self.teacher_weight:g}: the loss is WEIGHT times the "
                f"divergence and 1 - WEIGHT times that of the rewards; give --reward and a --teacher-weight below 1, "
                f"or neither"
            )
        for given, name in [*(("reward", each) for each in self.reward), ("rollout", self.rollout)]:
            known = NAMES if given == "reward" else ()
            if name is not None and not _FUNCTION.fullmatch(name) and name not in known:
                close = [f"did you mean {each}? Else " for each in difflib.get_close_matches(name, known, n=1)]
                raise ValueError(
                    f"--{given} is {name!r}; {''.join(close)}give module:function, as in --{given} my_tools:{given}"
                    + f", or one of {', '.join(known)}" * bool(known)
                )
        if self.reward_weight and len(self.reward_weight) != len(self.reward):
            raise ValueError(
                f"--reward-weight is given {len(self.reward_weight)} times and --reward {len(self.reward)} times: give "
                f"one weight for each reward, or none"
            )
        if wrong := [weight for weight in self.reward_weight if not math.isfinite(weight)]:
            raise ValueError(f"--reward-weight is {wrong[0]}; it must be finite")
        if self.generations < 2 and self.reward:
            raise ValueError(
                f"--generations is {self.generations}: a completion is compared with others of the same prompt, so "
                f"give at least 2"
            )
        if self.loss == "cispo" and self.clip_high is None:
            raise ValueError("--loss is cispo and has no --clip-high, its largest ratio: give --clip-high 5")

    @property
    def overlaps(self) -> bool:
        """True if completions are computed while others are sampled."""
        return self.overlap_rollout != "off" and self.needs_phases is None

    @property
    def needs_phases(self) -> str | None:
        """Why no completion can be computed before the last one is there, with the option; None if it can."""
        if self.iterations > 1:
            return f"--iterations is {self.iterations}: later updates need the first one's log-probabilities of all"
        if self.scale_rewards == "batch":
            return "--scale-rewards is batch: the deviation is that of all completions' rewards"
        if self.exact and self.overlap_rollout == "auto":
            return "--exact is True: bits would depend on which completions share a pack, and so on when they come"
        return None

    def _check_contradictions(self) -> None:
        if self.overlap_rollout == "on" and self.needs_phases is not None:
            raise ValueError(
                f"{self.needs_phases}, so none can be computed before the last one is there: leave --overlap-rollout "
                f"out"
            )
        if self.kl and not self.reward:
            raise ValueError(
                f"--kl is {self.kl}: it is a part of the loss of rewards; give --reward too, or leave it out"
            )
        if self.kl and self.lora_rank and self.init is not None:
            raise ValueError(
                f"--kl is {self.kl} with --lora-rank {self.lora_rank}, and --init would draw other weights for the "
                f"reference model: give --model"
            )
        if self.engine == "vllm-colocate" and self.model is None:
            raise ValueError("--engine is vllm-colocate, which loads the model's folder itself: give --model")
        if (self.vllm_server is not None) != (self.engine == "vllm-server"):
            raise ValueError(
                f"--engine is {self.engine} and --vllm-server is {self.vllm_server}: give --engine vllm-server and "
                f"--vllm-server ADDRESS together"
            )
        if self.eval_samples and self.eval_data is None:
            raise ValueError(f"--eval-samples is {self.eval_samples} and there is no --eval-data: give it")
        for name in ("early_stopping", "keep_best"):
            if (value := getattr(self, name)) and not self.reward:
                raise ValueError(f"{flag(name)} is {value} and compares eval_reward: give --reward, or leave it out")
        super()._check_contradictions()

    def identity(self, world: int) -> dict[str, Any]:
        wanted = super().identity(world)
        return {"job": "grpo", **wanted, "reward": list(self.reward), "reward_weight": list(self.reward_weight)}
