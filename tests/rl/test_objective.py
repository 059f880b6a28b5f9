"""Seeds, prompts of a step, and GRPO's arithmetic where the comparison with TRL's loss on ranks does not reach."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from odc_triton.hf import enable_packing
from odc_triton.jobs.data.tokenizer import read_tokenizer
from odc_triton.jobs.rl.generation import Sampled
from odc_triton.jobs.rl.learned import Learned
from odc_triton.jobs.rl.policy_gradient import PolicyGradient
from odc_triton.jobs.rl.policy_loss import LearningRule, PolicyLoss, TokenTerms, advantages
from odc_triton.jobs.rl.prompts import Prompt, completion_seed, read_prompts
from odc_triton.jobs.rl.rollout import PromptSlot, Rollout
from odc_triton.packs.collate import Pack
from odc_triton.packs.loss import predictions
from odc_triton.plan.entries import Segment
from odc_triton.plan.fields import IGNORED
from odc_triton.plan.order import Mix, in_passes
from odc_triton.step import Terms
from tests.support.grpo_case import trl_advantages
from tests.support.sft_case import QWEN2, write_case

RULE = LearningRule(loss="dapo", rows=1, most_tokens=8)
REWARDS = torch.tensor([[0.0, 1.0, 0.5], [0.2, 0.2, 0.2], [3.0, -1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_trls(scale: str) -> None:
    want = trl_advantages(REWARDS, scale)
    found = advantages(REWARDS, scale)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    assert (found[1] == 0).all(), "exactly 0, so that the group is left out"


def test_a_reward_that_no_function_gave_counts_for_nothing() -> None:
    some = REWARDS.clone()
    some[0, 1] = math.nan
    found = advantages(some, "group")
    assert found[0, 1] == 0
    torch.testing.assert_close(found[0, [0, 2]], trl_advantages(some[:1, [0, 2]], "group")[0])
    assert (advantages(torch.full((2, 3), math.nan), "group") == 0).all()
    known = some[~some.isnan()]
    want = (some[2] - some[2].mean()) / (known.std() + 1e-4)  # TRL's epsilon
    torch.testing.assert_close(advantages(some, "batch")[2], want, rtol=1e-12, atol=1e-12)


def test_equal_rewards_that_round_differently() -> None:
    """0.1 + 0.2 is not 0.3: their mean is not exactly any of them, and the deviation not exactly 0."""
    assert (advantages(torch.full((1, 3), 0.1, dtype=torch.float64), "group") == 0).all()


# By loss, and whether truncated completions are masked: TRL's denominators, of the first group's completions.
WEIGHTS = {
    ("dapo", False): [1 / 15, 1 / 15],
    ("dapo", True): [1 / 5],
    ("cispo", True): [1 / 5],
    ("grpo", False): [1 / 12, 1 / 20],
    ("grpo", True): [1 / 12],
    ("gspo", True): [1 / 12],
    ("dr_grpo", False): [1 / 24, 1 / 24],
    ("dr_grpo", True): [1 / 24],
}


@pytest.mark.parametrize(("loss", "masked"), WEIGHTS)
def test_what_a_step_learns_of_truncated_completions(loss: str, masked: bool) -> None:
    """Those that are masked, and groups of equal rewards, teach nothing; all rows count, and tokens that are kept."""
    lengths, rewards = ((3, 5), (2, 5)), torch.tensor([[1.0, 0.0], [0.5, 0.5]])  # of each two, the second is truncated
    prompt = Prompt(ids=[8, 9], given="", columns={})
    sampled = [
        [Sampled(ids=[7] * length, logps=[0.0] * length, ended=length < 5) for length in group] for group in lengths
    ]
    made = Rollout(
        slots=[PromptSlot(prompt=prompt, seeds=[0, 1])] * 2,
        sampled=sampled,
        rewards=rewards[None],
        totals=rewards,
        rollout_s=0.0,
        scoring_s=0.0,
    )
    rule = LearningRule(loss=loss, rows=4, most_tokens=6, mask_truncated=masked)
    found = Learned.of(made, rule, "none")
    weights = [weight / found.divisor for weight in found.weight.values()]
    assert weights == pytest.approx(WEIGHTS[loss, masked])
    assert [*found.advantage.values()] == [0.5, -0.5][: len(weights)]
    assert [*map(found.length, found.samples)] == [5, 7][: len(weights)]
    assert found.tokens == (5 if masked else 15)
    assert len(Learned.of(made, replace(rule, keep_all=True), "none").samples) == (2 if masked else 4)


def _of_one(ids: list[int], labels: list[int]) -> Learned:
    count = len(labels) - labels.count(IGNORED)
    one = {"advantage": {0: 1.0}, "weight": {0: 1.0}, "sampled": {0: [0.0] * count}}
    return Learned(rule=RULE, samples={0: {"input_ids": ids, "labels": labels}}, **one)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_policy_does_not_diverge_from_itself(temperature: float) -> None:
    """At the temperature that completions are sampled at."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN2))
    enable_packing(model)
    ids = [5, 60, 7, 80]
    learned = _of_one(ids, [IGNORED, *ids[1:]])
    rule = PolicyLoss(loss="dapo", low=0.2, high=0.2, kl=1.0)

    def reference(pack: Pack) -> torch.Tensor:
        return predictions(model, pack)[0].detach()

    objective = PolicyGradient(rule=rule, batch=learned, reference=reference, temperature=temperature)
    _, found = objective.loss(model, objective.collate([0]), Terms(number=1))
    assert found["kl"] == 0


def test_the_divergence_is_of_the_policy_from_the_reference() -> None:
    """Over tokens that are as frequent as they are likely, the estimates' mean is the divergence itself."""
    policy = torch.tensor([4, 2, 1, 1], dtype=torch.float64) / 8
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    drawn = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    logp = policy.log()[drawn]
    terms = TokenTerms(
        advantage=torch.zeros(8), weight=torch.full((8,), 1 / 8), old=logp, reference=reference.log()[drawn]
    )
    loss, sums = PolicyLoss(loss="dapo", low=0.2, high=0.2, kl=0.5)(logp, terms)
    want = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close(sums["kl"] / 8, want)
    torch.testing.assert_close(loss.sum(), 0.5 * want)


def test_segments_predict_each_token_once() -> None:
    """A sample of 4 prompt tokens and 8 of a completion, two of them from outside, cut anywhere."""
    labels = [IGNORED] * 4 + [4, 5, IGNORED, IGNORED, 8, 9, 10, 11]
    learned = _of_one([*range(12)], labels)
    assert learned.predicted(0) == slice(0, 6)
    for cut in range(1, 12):
        first, second = (learned.predicted(Segment(0, *edges)) for edges in ((0, cut), (cut, 12)))
        assert [*range(6)[first], *range(6)[second]] == list(range(6))
        # The segment's last position predicts the next segment's first token.
        assert first.stop == sum(label != IGNORED for label in labels[: cut + 1])


def test_seeds_differ_and_do_not_change() -> None:
    seeds = {completion_seed(s, t, p, g) for s in range(3) for t in range(3) for p in range(3) for g in range(3)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert completion_seed(0, 1, 2, 3) == 5176715130983007433


def test_a_step_across_the_end_of_a_pass_goes_on_in_the_order_of_the_next() -> None:
    mix = Mix((4,))
    taken = [index for step in range(4) for index in in_passes(mix, step, 3, seed="prompts 5")]
    orders = [mix.order(epoch, "prompts 5") for epoch in range(3)]
    assert taken == [index for order in orders for index in order]
    assert all(sorted(order) == [*range(4)] for order in orders)
    assert orders[0][:2] != orders[1][:2] != orders[2][:2], "else a step could not show which order it takes"


def test_prompts_of_messages_end_where_the_assistant_begins(tmp_path: Path) -> None:
    write_case(tmp_path)
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    turn = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}[assistant]{% endif %}"
    rows = [{"prompt": [{"role": "user", "content": "why"}], "answer": 1}, {"prompt": "why not", "extra": None}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat, text = read_prompts(str(tmp_path / "p.jsonl"), tokenizer, most_tokens=99)
    assert tokenizer.decode(chat.ids) == "[user]why[assistant]"
    assert (chat.given, chat.columns) == (rows[0]["prompt"], {"answer": 1})
    assert tokenizer.decode(text.ids, skip_special_tokens=True) == "why not"
