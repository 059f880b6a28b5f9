"""Rollouts of several turns: what a function's engine samples, and what the function may return."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
import torch

from odc_triton.base.errors import GenerationFailed
from odc_triton.jobs.launcher.launch import Interrupted
from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.rollout import _packed, _unpacked
from odc_triton.jobs.rl.transformers_engine import TransformersEngine
from odc_triton.jobs.rl.turns import RolloutFunction, TurnEngine
from tests.rl.test_transformers_engine import END, PROMPTS, _model
from tests.support.grpo_case import Recorded

OPTIONS = SamplingOptions(temperature=1.0, max_new_tokens=12, end_tokens=(END,))
SEEDS = [7, 8]


def _turns(engine: TurnEngine, rows: list[int]) -> list[list[int]]:
    """Two turns with one to three tokens from outside after each, and one more for all that is left."""
    ids = [list(engine.prompt_ids[row]) for row in rows]
    for most in (2, 3, None):
        for some, one in zip(ids, engine.generate(ids, most, rows=rows), strict=True):
            some += one.ids + [9] * (1 + sum(one.ids) % 3 if most else 0)
    return ids


def test_a_completion_depends_on_its_seed_and_its_turns_alone() -> None:
    """Of all prompts together, in another order, and of each alone; a second turn has other random numbers."""
    completions = TransformersEngine(_model())
    requests = [Request(ids=ids, seeds=SEEDS) for ids in PROMPTS]
    together = _turns(TurnEngine(completions, requests, OPTIONS, None), [*range(6)])
    order = [4, 1, 5, 0, 3, 2]
    assert _turns(TurnEngine(completions, requests, OPTIONS, None), order) == [together[row] for row in order]
    for place, request in enumerate(requests):
        assert _turns(TurnEngine(completions, [request], OPTIONS, None), [0, 1]) == together[2 * place :][:2]
    lengths = [len(ids) - len(PROMPTS[row // 2]) for row, ids in enumerate(together)]
    assert max(lengths) == 12, "tokens from outside count"
    # A first turn alone is what the engine samples without a function.
    alone = TurnEngine(completions, requests, OPTIONS, None)
    first = alone.generate(alone.prompt_ids)
    assert first == [one for group in completions.generate(requests, OPTIONS) for one in group]
    assert alone.generate(alone.prompt_ids) != first


def test_a_turn_ends_at_its_own_token_and_where_nothing_is_left() -> None:
    engine = TurnEngine(TransformersEngine(_model()), [Request(ids=[5, 6], seeds=[7])], OPTIONS, None)
    (whole,) = engine.generate([[5, 6]])
    engine = TurnEngine(TransformersEngine(_model()), [Request(ids=[5, 6], seeds=[7])], OPTIONS, None)
    (cut,) = engine.generate([[5, 6]], stop_tokens=[whole.ids[1]])
    assert cut == Sampled(ids=whole.ids[:2], logps=whole.logps[:2], ended=True)
    assert engine.generate([[5, 6, *range(12)]]) == [Sampled(ids=[], logps=[], ended=False)]
    for rows in ([0, 0], None):
        with pytest.raises(ValueError, match=r"generate has 2 lists of tokens for the prompts \[0"):
            engine.generate([[5]] * 2, rows=rows)


def _function(returned: Any) -> RolloutFunction:
    made = RolloutFunction("tests.rollouts:turns", longest=3, vocabulary=64)
    made._function = returned if callable(returned) else lambda prompts, engine: returned
    return made


def _engine(**how: Any) -> TurnEngine:
    return TurnEngine(Recorded(64), [Request(ids=[5, 6], seeds=SEEDS)], OPTIONS, None, **how)


GOOD = {
    "prompt_ids": [[5, 6], [4]],
    "completion_ids": [[8, 9, END], torch.tensor([10, 11])],
    "logprobs": [[-1.0, None, -2.0], [math.nan, -1]],
    "env_mask": [[1, 0, 1], [0, 1]],
}


def test_what_a_function_returns() -> None:
    one, two = _function(GOOD | {"calls": [1, 2], "tool": "calculator"})(["a", "b"], _engine())[0]
    assert (one.ids, one.own, one.ended, one.prompt) == ([8, 9, END], [1, 0, 1], True, None)
    assert one.logps == pytest.approx([-1.0, math.nan, -2.0], nan_ok=True)
    assert (two.ids, two.own, two.ended, two.prompt) == ([10, 11], [0, 1], False, [4])
    plain, columns = _function(GOOD | {"env_mask": None, "logprobs": None, "calls": [1, 2], "tool": "x"})(
        "ab", _engine()
    )
    assert columns == {"calls": [1, 2], "tool": ["x", "x"]}
    assert plain[0].own == [1, 1, 1]
    assert all(map(math.isnan, plain[0].logps))


BAD = {
    "list; return a dict with prompt_ids, completion_ids, logprobs": [],
    "1 completion_ids for 2 prompts; return one for each": GOOD | {"completion_ids": [[5]]},
    "completion 1 has -1 to 11; tokens are under 64": GOOD | {"completion_ids": [[8, 9, END], [-1, 11]]},
    "completion 1 has no token of the model": GOOD | {"env_mask": [[1, 0, 1], [0, 0]]},
    "completion 1 has no token of the prompt": GOOD | {"prompt_ids": [[5, 6], []]},
    "1 prompt_ids and 13 completion_ids; return at most 3, as the data's longest prompt, and --max-new-tokens 12": GOOD
    | {"completion_ids": [[8, 9, END], [5] * 13]},
    "completion 0 has 3 completion_ids, 2 logprobs and 3 env_mask; return a number or None, and 0 or 1": GOOD
    | {"logprobs": [[-1.0] * 2, [-1.0] * 2]},
    "completion 0 has 3 completion_ids, 3 logprobs and 3 env_mask; return": GOOD | {"env_mask": [[1, 0, 2], [1, 1]]},
    "'float' object cannot be interpreted as an integer": GOOD | {"completion_ids": [[1.5], [1]]},
}


@pytest.mark.parametrize("words", BAD)
def test_what_is_refused(words: str) -> None:
    with pytest.raises(GenerationFailed) as refused:
        _function(BAD[words])(["a", "b"], _engine())
    assert str(refused.value).startswith("rollout tests.rollouts:turns returned something else than TRL's: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_function_that_raises_that_is_stopped_and_that_changes_its_prompts() -> None:
    def raising(prompts: list[Any], engine: TurnEngine) -> None:
        prompts[0].append("changed")
        assert not torch.is_grad_enabled()
        raise KeyError("x")

    prompt = ["a message"]
    with pytest.raises(
        GenerationFailed, match=r"^rollout tests.rollouts:turns raised KeyError: 'x'\nTraceback"
    ) as error:
        _function(raising)([prompt] * 2, _engine())
    assert "in raising" in str(error.value)
    assert prompt == ["a message"]
    with pytest.raises(Interrupted):
        _function(lambda prompts, engine: engine.generate(engine.prompt_ids))(
            "ab", _engine(stop=lambda: signal.SIGTERM)
        )


def test_a_sampler_sends_masks_and_prompts() -> None:
    for one in (
        Sampled(ids=[5, 70000], logps=[-1.0, -0.5], ended=True),
        Sampled(ids=[5, 6], logps=[-1.0, -0.5], ended=False, mask=[0, 1], prompt=[4]),
    ):
        assert _unpacked(_packed(one)) == one
