"""examples/calculator.py: its commands as they stand, and that the model learns to ask."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from examples import calculator
from odc_triton.jobs.data.tokenizer import load_tokenizer, to_transformers
from odc_triton.jobs.rl.generation import Request, Sampled, SamplingOptions
from odc_triton.jobs.rl.prompts import read_prompts
from odc_triton.jobs.rl.turns import RolloutFunction, TurnEngine
from odc_triton.jobs.train.metrics import read_metrics
from tests.support.deadlines import LONG_S

ROOT = Path(__file__).parents[1]
COMMANDS = re.findall(r"^    ((?:python|odc-triton) .+(?:\\\n.+)*)", calculator.__doc__.replace("\\\n", " "), re.M)


class _Says:
    """An engine that says these texts, one a turn, up to the first of its end tokens."""

    def __init__(self, tokenizer, *texts: str) -> None:
        self.tokenizer, self.texts = tokenizer, list(texts)

    def generate(self, requests: list[Request], options: SamplingOptions) -> list[list[Sampled]]:
        ids = self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False)[: options.max_new_tokens]
        (_,) = requests
        return [[Sampled(ids=ids, logps=[-0.5] * len(ids), ended=ids[-1] in options.end_tokens)]]


@pytest.mark.parametrize(
    ("texts", "completion", "mask"),
    [
        (["<12*12>", "=144<|end|>"], "<12*12>[144]=144", "1111111" + "00000" + "11111"),
        (["<1**2>", "=2<|end|>"], "<1**2>[?]=2", "111111" + "000" + "111"),
        (["<9*9>", "<8*8>", "=<|end|>"], "<9*9>[81]<8*8>[64]=", "11111" + "0000" + "11111" + "0000" + "11"),
        # The second call's output would not leave a token: the completion ends with the call.
        (["<9*9>", "=<99999*9999>"], "<9*9>[81]=<99999*9999>", "11111" + "0000" + "1" * 13),
    ],
)
def test_the_output_of_a_call_is_put_in_and_not_learned(
    texts: list[str], completion: str, mask: str, tmp_path: Path
) -> None:
    calculator.write(tmp_path, 0, 3, 2, 1)
    tokenizer = to_transformers(load_tokenizer(tmp_path / "tokenizer.json"))
    ends = (tokenizer.eos_token_id,)
    options = SamplingOptions(temperature=1.0, max_new_tokens=24, end_tokens=ends)
    engine = TurnEngine(_Says(tokenizer, *texts), [Request(ids=[5], seeds=[1])], options, tokenizer)
    ((one,), _) = RolloutFunction("examples.calculator:rollout", longest=1, vocabulary=24)(["5"], engine)
    assert tokenizer.decode(one.ids, skip_special_tokens=True) == completion
    assert "".join(map(str, one.own)) == mask


def _passes(model: Path, held_out: Path) -> float:
    """The share of right answers, greedily, by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from odc_triton.jobs.rl.transformers_engine import TransformersEngine

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = read_prompts(str(held_out), tokenizer, most_tokens=99)
    options = SamplingOptions(temperature=0.0, max_new_tokens=32, end_tokens=(tokenizer.eos_token_id,))
    requests = [Request(ids=each.ids, seeds=[0]) for each in prompts]
    network = AutoModelForCausalLM.from_pretrained(model)
    made = calculator.rollout(
        [each.given for each in prompts], TurnEngine(TransformersEngine(network), requests, options, tokenizer)
    )
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in made["completion_ids"]]
    return statistics.mean(calculator.right(texts, [each.columns["answer"] for each in prompts]))


@pytest.mark.slow
def test_a_model_learns_to_ask_and_nothing_without_the_tool(tmp_path: Path) -> None:
    """Seeds 0, 1 and 2 of the data went from 0% to more than 75% of the held-out questions."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    place = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    data, teach, learn = COMMANDS
    without = re.sub(r"--rollout \S+", "", learn).replace("/grpo ", "/without ").replace("--steps 20", "--steps 3")
    for command in (data, teach, learn, without):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=os.environ | place | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=LONG_S,
        )
        assert done.returncode == 0, command + done.stdout + done.stderr
    out = tmp_path / "out" / "calculator"
    assert _passes(out / "sft" / "model", out / "held_out.jsonl") <= 0.1
    after = _passes(out / "grpo" / "model", out / "held_out.jsonl")
    assert after >= 0.5
    found = read_metrics(out / "grpo" / "metrics.jsonl")
    assert found[-1]["eval_pass"] == pytest.approx(after, abs=0.02)  # rounding may tip a token
    assert found[-1]["reward"] > 2 * found[0]["reward"]
    samples = [json.loads(line) for line in (out / "grpo" / "samples.jsonl").read_text().splitlines()]
    assert any(re.fullmatch(r"<\d+\*\d+>\[\d+\]=\d+", each["completion"]) for each in samples)
    assert all(line["reward"] == 0 for line in read_metrics(out / "without" / "metrics.jsonl"))
