"""Rewards by name: what they give, on texts that a model may write, and what the small checker says of answers."""

from __future__ import annotations

import json
import time
from contextlib import closing
from pathlib import Path

import pytest

from odc_triton.jobs.rl import named_rewards
from odc_triton.jobs.rl.answers import final_answer, same_answer
from odc_triton.jobs.rl.rewards import Rewards
from tests.support.deadlines import LONG_S

EXPECTED = json.loads((Path(__file__).parent / "answers.json").read_text())["expected"]


def test_answers_are_equal_to_those_that_math_verify_finds_equal():
    rows = [(one, other, is_same) for one, others in EXPECTED.items() for other, is_same in others.items()]
    found = [(one, other, same_answer(one, other)) for one, other, _ in rows]
    unsure = sum(is_same is None for *_, is_same in found)
    assert [row for row, own in zip(rows, found, strict=True) if own not in (row, (*row[:2], None))] == []
    assert len(rows) >= 200
    assert unsure <= 0.15 * len(rows)


ANSWERS = {
    "so \\boxed{\\frac{1}{2}}.": "\\frac{1}{2}",
    "\\boxed{1} and \\boxed{2}": "1,2",
    "\\boxed{1} is wrong. Let me think about that once more. \\boxed{2}": "2",
    "He has 2 + 3 = 5.\n#### 1,234\n": "1,234",
    "The answer is $5$ apples. Bye.": "5",
    "**Answer:** (B).": "(B)",
    "<think>\\boxed{3}</think> It is \\boxed{4}": "4",
    "5": None,
    "": None,
    "\\boxed{" * 9: None,
    "The answer is $18. That leaves $9.": "$18",
    "#### **72**": "72",
    r"The answer is $\$72$.": r"$\$72$",
    "The answer is 72. I am sure that this answer is right.": "72",
    "#### **Answer:** 72": "72",
    r"\boxed{5}. Wait, let me look again. " + "So it goes on, and on. " * 9 + r"\boxed{6}": "6",
    r"$x = \boxed{5}$ or $x = \boxed{6}$": "5,6",
}


@pytest.mark.parametrize(("text", "answer"), ANSWERS.items())
def test_finds_answers(text: str, answer: str | None):
    assert final_answer(text) == answer


ENDLESS = ("\\boxed{", "\\boxed{1}", "answer is ", "answer: \\(", "#### ", "{", "$", "\\boxed{" + "9," * 200, "<think>")


@pytest.mark.parametrize("text", ENDLESS)
def test_a_million_characters(text: str):
    batch = [text * (1_000_000 // len(text))]
    for name in named_rewards.NAMES:
        rewards = named_rewards.named_reward(name, max_new_tokens=4, timeout_s=LONG_S)
        assert rewards(completions=batch, completion_ids=[[1]], answer=["#### 72"]) in ([0.0], [None])


def test_rewards_by_name(capfd: pytest.CaptureFixture[str]):
    texts = [
        "<think>a</think> \\boxed{72}",
        "<think>a<think>b</think> #### 71",
        "\\boxed{x + y}",
        "<think>72</think>",
        "\\boxed{72}",
    ]
    given = [*texts[:1], [{"role": "assistant", "content": texts[1]}], *texts[2:]]
    columns = {"answer": ["48/2 = 24\n#### 72"] * 4 + [None], "solution": [None] * 4 + ["\\boxed{72.0}"]}
    with closing(Rewards(["accuracy", "format", "length"], timeout_s=LONG_S, max_new_tokens=20)) as rewards:
        scores = rewards.score(["p"] * 5, given, [[0] * n for n in (1, 16, 18, 20, 21)], columns)
    assert [[None if each != each else each for each in one] for one in scores] == [
        [1, 0, None, 0, 1],
        [1, 0, 0, 0, 0],
        [0, 0, -0.5, -1, -1],
    ]
    assert "1 of 5 answers are not compared; pip install math-verify compares more" in capfd.readouterr().err
    with pytest.raises(ValueError, match=r"the data have 'question' in addition to .* --map answer=COLUMN"):
        Rewards(["accuracy"]).check(["question"])


def test_an_answer_that_takes_too_long_is_wrong_and_the_next_is_compared(monkeypatch: pytest.MonkeyPatch):
    def verify(pipe) -> None:
        while True:
            reference, answer = pipe.recv()
            time.sleep(3600 * (answer == "late"))
            pipe.send(reference == answer)

    monkeypatch.setattr(named_rewards, "_verify", verify)
    verifier = named_rewards._Verifier()
    assert verifier.compare("1", "late", 0.2) is False
    assert verifier.compare("1", "1", LONG_S) is True
    assert verifier.compare("1", "1", 0) is None
    verifier._process.kill()


def test_rows_without_an_answer_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    reward = named_rewards.named_reward("accuracy", max_new_tokens=8, timeout_s=60)
    assert reward(completions=["#### 5", "#### 6"], answer=["5", None], solution=["", ""]) == [1.0, None]
    assert "1 completions of this batch are of rows without 'answer' or 'solution'" in capfd.readouterr().err


def test_prompts_without_an_answer_that_can_be_compared_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"answer": 4},
        {"answer": "", "solution": "so #### 5"},
        {"answer": None},
        {"other": 1},
        {"answer": "x^2 + 1"},
    ]
    said = "of 5 prompts have no answer that reward accuracy compares: 2 have none in 'answer' or 'solution'"
    monkeypatch.setattr(named_rewards.importlib.util, "find_spec", lambda name: None)
    assert named_rewards.without_answer(rows).startswith(f"3 {said}; 1 have no number or word")
    monkeypatch.setattr(named_rewards.importlib.util, "find_spec", lambda name: name)
    assert named_rewards.without_answer(rows) == f"2 {said}"
    assert named_rewards.without_answer(rows[:2]) == ""
