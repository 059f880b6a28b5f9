"""Examples of Ray Train, on workers that have different numbers of microbatches, and where one of them is killed."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.programs.harness import ALONE, Program, Run, compared, largest_difference, read_weights, run, script

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLED = script("ray_killed.py")
WITHIN = 1e-5  # AdamW, in float32
# Ray looks after workers this often. It stops rank 0 when it finds rank 1 dead: rank 0 names it before.
VARIABLES = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "4",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def _program(name: str, words: list[str], weights: list[str]) -> Program:
    return Program(
        name=name,
        words=words,
        launcher=ALONE,
        environment="lightning",
        weights=weights,
        packages=["ray", "transformers"],
        variables=VARIABLES,
    )


def _assert_named(run: Run) -> None:
    assert (run.folder / "killed").exists()
    assert re.search(r"RankLost: rank 0 was waiting for '.* minibatch \d+': rank 1 died", run.output)


def test_a_loop(tmp_path: Path) -> None:
    """On two and six microbatches a step, against one process of plain torch."""
    example, saved = str(EXAMPLES / "ray_train.py"), ["**/checkpoint_*-*", "weights.pt"]
    alone = run(_program("", [script("ray_alone.py"), example, "{out}"], saved), tmp_path / "alone")
    undisturbed = _program("Ray Train, a loop", [example, "{out}"], saved)
    killed = replace(undisturbed, name="Ray Train, a loop, killed", words=[KILLED, *undisturbed.words])
    for program in (undisturbed, killed):
        done = run(program, tmp_path / program.name)
        assert compared(program, alone, done).difference <= WITHIN
        assert f"{{'step': 5, 'first': {4 if program is killed else 0}}}" in done.output
    _assert_named(done)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(f"w{draw.randrange(3, 97)}" for _ in range(draw.randint(2, most)))

    records = [{"prompt": words(9), "completion": words(40)} for _ in range(80)]
    (file := tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return file


def test_train_sft(model: Path, data: Path, tmp_path: Path) -> None:
    """A run in which a worker is killed ends with the weights of the undisturbed one."""
    words = [str(EXAMPLES / "ray_sft.py"), str(model), str(data), "{out}"]
    program = _program("Ray Train, train sft, killed", words, ["run/model/*.safetensors"])
    undisturbed = run(program, tmp_path / "undisturbed")
    killed = run(replace(program, words=[KILLED, *words]), tmp_path / "killed")
    assert compared(program, undisturbed, killed).difference <= WITHIN
    assert largest_difference(read_weights(model), undisturbed.weights()) > 100 * WITHIN
    _assert_named(killed)
