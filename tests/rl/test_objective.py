"""Seeds, prompts of a step, and GRPO's arithmetic where the comparison with TRL's loss on ranks does not reach."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from odc_triton.balance.pieces import Piece
from odc_triton.data.order import Mix
from odc_triton.rl.learned import Learned
from odc_triton.rl.objective import Denominators, advantages
from odc_triton.rl.prompts import completion_seed, prompts_of_step, read_prompts
from tests.support.grpo_case import trl_advantages
from tests.support.sft_case import write_case

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


def test_equal_rewards_that_round_differently() -> None:
    """0.1 + 0.2 is not 0.3: their mean is not exactly any of them, and the deviation not exactly 0."""
    assert (advantages(torch.full((1, 3), 0.1, dtype=torch.float64), "group") == 0).all()


def test_weights() -> None:
    all_of_them = Denominators(tokens=50, rows=4, most_tokens=20)
    assert all_of_them.weight("dapo", 5) == all_of_them.weight("cispo", 5) == 1 / 50
    assert all_of_them.weight("grpo", 5) == all_of_them.weight("gspo", 5) == 1 / 20
    assert all_of_them.weight("dr_grpo", 5) == 1 / 80


def test_pieces_predict_each_token_once() -> None:
    """A sample of 4 prompt tokens and 6 sampled ones, cut anywhere."""
    learned = Learned(
        samples=[{"input_ids": list(range(10)), "labels": []}],
        advantage=[1.0],
        weight=[1.0],
        sampled=[[0.0] * 6],
        tokens=6,
    )
    assert learned._predicted(0) == slice(0, 6)
    for cut in range(1, 10):
        first, second = (learned._predicted(Piece(0, *edges)) for edges in ((0, cut), (cut, 10)))
        assert [*range(6)[first], *range(6)[second]] == list(range(6))
        # The piece's last position predicts the next piece's first token.
        assert first.stop == max(cut + 1 - 4, 0)


def test_seeds_differ_and_do_not_change() -> None:
    seeds = {completion_seed(s, t, p, g) for s in range(3) for t in range(3) for p in range(3) for g in range(3)}
    assert len(seeds) == 81
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert completion_seed(0, 1, 2, 3) == 5176715130983007433


def test_every_prompt_once_in_a_pass() -> None:
    taken = [index for step in range(6) for index in prompts_of_step(Mix((9,)), step, per_step=3, seed=5)]
    assert sorted(taken[:9]) == sorted(taken[9:]) == list(range(9))
    assert taken[:9] not in (taken[9:], list(range(9)))
    straddling = prompts_of_step(Mix((4,)), 1, per_step=3, seed=5)  # the last of one pass, the first two of the next
    assert straddling[0] not in prompts_of_step(Mix((4,)), 0, per_step=3, seed=5)


def test_prompts_of_messages_end_where_the_assistant_begins(tmp_path: Path) -> None:
    import json

    from odc_triton.data.tokenizer import read_tokenizer

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
