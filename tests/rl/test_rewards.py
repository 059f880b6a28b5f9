"""Reward functions in their process: what they are given, and each way in which they can fail."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from odc_triton.jobs.rl.rewards import RewardFailed, Rewards
from tests.support import leftovers
from tests.support.deadlines import LONG_S, SHORT_S

FUNCTIONS = """
import os, pathlib, signal, subprocess, sys, time

def exact(prompts, completions, completion_ids, answer, **columns):
    return [float(text == right) for text, right in zip(completions, answer)]

async def length(completions, **columns):
    print("from the reward")
    os.write(1, b"and lower down\\n")  # goes to stderr, and does not break the channel
    return [len(text) if len(text) else None for text in completions]

def tokens(completion_ids, **columns):
    return [sum(ids) for ids in completion_ids]

def raises(prompts, **columns):
    if any("bad" in prompt for prompt in prompts):
        raise KeyError("no such answer")
    return [1.0] * len(prompts)

def too_few(prompts, **columns):
    return [1.0] * (len(prompts) - 1)

def not_a_number(prompts, **columns):
    return [float("nan") if "bad" in prompt else 1.0 for prompt in prompts]

def enormous(prompts, **columns):
    return [-1e308 if "bad" in prompt else 1.0 for prompt in prompts]

def hangs(prompts, **columns):
    started = subprocess.Popen(["sleep", "3000"])
    with pathlib.Path(__file__).with_name("started").open("a") as file:
        print(started.pid, file=file)
    while any("bad" in prompt for prompt in prompts):
        time.sleep(0.01)
    return [1.0] * len(prompts)

def killed(prompts, **columns):
    if any("bad" in prompt for prompt in prompts):
        if os.fork() == 0:  # holds the socket
            time.sleep(3000)
        os.kill(os.getpid(), signal.SIGKILL)
    return [1.0] * len(prompts)

def leaves(prompts, **columns):
    sys.exit(3)

def pid(prompts, **columns):
    return [os.getpid()] * len(prompts)

def odd(completions, completion_ids, answer, **columns):
    return eval(answer[0], {"n": len(completions)} | {name: __import__(name) for name in ("decimal", "fractions")})

def needs(prompts, completions, completion_ids, answer):
    return [0.0] * len(completions)

def positional(a, b):
    return []

number = 3
"""


@pytest.fixture(autouse=True)
def _functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def rewards() -> Iterator[Callable[..., Rewards]]:
    made: list[Rewards] = []

    def make(*functions: str, timeout_s: float = LONG_S, weights: list[float] | None = None) -> Rewards:
        made.append(Rewards([f"my_rewards:{name}" for name in functions], weights=weights, timeout_s=timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def _started(folder: Path) -> list[int]:
    """The pids of what the functions in `folder` started."""
    return [int(line) for line in (folder / "started").read_text().split()]


def _assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + LONG_S
    while left := [pid for pid in pids if leftovers.is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {left} are still there"
        time.sleep(0.02)


PROMPTS = ["good", "a bad prompt, " + "x" * 300, "fine"]


def _score(rewards: Rewards, prompts: list[str] = PROMPTS) -> list[list[float]]:
    return rewards.score(prompts, ["" for _ in prompts], [[] for _ in prompts], {})


def test_scores(rewards: Callable[..., Rewards]) -> None:
    scored = rewards("exact", "length", "tokens", weights=[1, 0.5, 2])
    scores = scored.score(["p"] * 3, ["4", "", "12"], [[1, 2], [], [5]], {"answer": ["4", "1", "1"], "more": [1, 2, 3]})
    assert scores[0] == [1, 0, 0]
    assert scores[1][::2] == [1, 2]
    assert math.isnan(scores[1][1])
    assert scores[2] == [3, 0, 5]
    assert scored.total(scores) == [1 + 0.5 + 6, 0, 1 + 10]
    assert math.isnan(scored.total([[math.nan]] * 3)[0])
    count = 100_000  # the socket holds less, in both directions
    many = scored.score(["p" * 30] * count, ["c" * 100] * count, [[]] * count, {"answer": [""] * count})
    assert many == [[0] * count, [100] * count, [0] * count]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises", ["KeyError: 'no such answer'", "it had 3 completions, the first of the prompt 'good'"]),
        ("too_few", ["2 rewards for 3 completions"]),
        ("not_a_number", ["returned nan for completion 2 of 3", "a bad prompt"]),
        ("enormous", ["returned -1e+308, with the weight 1, for completion 2 of 3", "return numbers up to 1e+30"]),
        ("exact", ["missing 1 required positional argument: 'answer'"]),
        ("killed", ["killed by SIGKILL (out of memory?", "it had 3 completions, the first of the prompt 'good'"]),
        ("leaves", ["ended with status 3"]),
        ("hangs", ["timeout of 1.5 s; it had 3 completions, the first of the prompt 'good'"]),
    ],
)
def test_failures(rewards: Callable[..., Rewards], tmp_path: Path, function: str, words: list[str]) -> None:
    scored = rewards(function, "pid", timeout_s=SHORT_S if function == "hangs" else LONG_S)
    works_on_others = function in ("raises", "not_a_number", "killed", "hangs")
    pid = _score(scored, ["good"])[1] if works_on_others else None
    with pytest.raises(RewardFailed) as raised:
        _score(scored)
    message = str(raised.value)
    for each in [f"reward my_rewards:{function}", *words]:
        assert each in message
    assert "x" * 186 in message or "a bad" not in message
    assert "x" * 187 not in message  # 200 characters
    if " raised " in message:
        assert "my_rewards.py" in message or function == "exact"  # the last lines of its traceback
        assert "reward_process.py" not in message
    scored.timeout_s = LONG_S
    if works_on_others:  # and in the same process, if only the function failed
        score, now = _score(scored, ["good"])
        assert score == [1]
        assert (now == pid) is (function in ("raises", "not_a_number"))
    if function == "hangs":
        scored.close()
        _assert_gone(_started(tmp_path))


ODD = [
    ("{i: -5.0 for i in range(n)}", "dict {0: -5.0, 1: -5.0}: return a list of 2 numbers"),
    ("{'right': [1.0, 0.0], 'short': [1.0, 1.0]}", "dict {'right': [1.0, 0.0], 'short'"),
    ("{1.0, 0.0}", "set {0.0, 1.0}"),
    ("'10'", "str '10': return a list"),
    ("__import__('numpy').ones((2, 2))", "ndarray array([[1., 1.]"),
    ("__import__('torch').ones(())", "Tensor tensor(1.)"),
    ("__import__('pandas').DataFrame([[1.0, 2.0], [3.0, 4.0]])", "DataFrame      0    1"),
    ("[[1.0], [2.0]]", "list [1.0] for completion 1 of 2"),
    ("__import__('numpy').array([1, 2], 'complex64')", "complex64 np.complex64(1+0j) for completion 1"),
    ("__import__('torch').ones(2, device='meta')", "Tensor tensor(..., device='meta', size=()) for completion 1"),
    ("(1.0 for _ in range(n - 1))", "1 rewards for 2 completions"),
    ("__import__('itertools').repeat(1.0)", "more than 2 rewards for 2 completions"),
    ("(None + 1 for _ in range(n))", "TypeError: unsupported operand"),
    ("{1: 2.0, 0: 3.0}.values()", [2.0, 3.0]),
    ("(float(i) for i in range(n))", [0.0, 1.0]),
    ("__import__('pandas').Series([1.5, 2.5], index=[7, 3])", [1.5, 2.5]),
    ("(decimal.Decimal('0.5'), fractions.Fraction(1, 4))", [0.5, 0.25]),
    ("[__import__('numpy').float32(2), True]", [2.0, 1.0]),
    ("__import__('torch').tensor([1, 2])", [1.0, 2.0]),
]


def test_odd_types(rewards: Callable[..., Rewards]) -> None:
    scored = rewards("odd")
    for made, found in ODD:
        given = ["a", "b"], ["c", "d"], [[1], [2]], {"answer": [made] * 2}
        if isinstance(found, list):
            assert scored.score(*given) == [found], made
            continue
        with pytest.raises(RewardFailed, match="reward my_rewards:odd r") as raised:  # returned, or raised
            scored.score(*given)
        assert found in str(raised.value), made


def test_columns_are_known_before_the_start(rewards: Callable[..., Rewards]) -> None:
    rewards("needs", "exact").check(["answer"])
    with pytest.raises(ValueError, match="an unexpected keyword argument 'level'"):
        rewards("needs").check(["answer"], ["answer", "level"])
    for columns, words in (
        (["answr", "level"], r"completion_ids, answr, level \(missing a required argument: 'answer'\), which are all"),
        (["answer", "level"], r"answer, level \(got an unexpected keyword argument 'level'\)"),
    ):
        with pytest.raises(ValueError, match="reward my_rewards:needs: needs can't be called with .*" + words):
            rewards("needs").check(columns)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "rewards/rw.py:exact",
            "there is no module .*: write rewards.rw:exact, and start the job in the folder that has it",
        ),
        ("no_such_module:exact", "there is no module no_such_module: start the job in the folder that has it"),
        ("my_rewards:exakt", "has no exakt: name one of its functions"),
        ("my_rewards:number", "number is 3, no function: name one of"),
        ("my_rewards:positional", r"can't be called with the keywords .* end its parameters with \*\*columns"),
        ("broken:exact", "importing broken raised ZeroDivisionError: division by zero"),
        ("leaving:exact", "importing leaving raised SystemExit: 4"),
    ],
)
def test_check_refuses(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit(4)")
    with pytest.raises(ValueError, match=words), closing(Rewards([name])) as rewards:
        rewards.check()


def test_starting_the_process_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(f"import time; time.sleep({SHORT_S})\ndef one(**columns): return [1.0]\n")
    with closing(Rewards(["late:one"], timeout_s=SHORT_S)) as rewards:
        assert _score(rewards, ["p"]) == [[1.0]]


_RANK = """
import signal
from odc_triton.jobs.rl.rewards import Rewards
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
rewards = Rewards(["my_rewards:pid", "my_rewards:hangs"])
print(*rewards.score(["p"], ["c"], [[1]], {})[0], flush=True)
rewards.score(["bad"], ["c"], [[1]], {})
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_process_ends_with_its_rank(tmp_path: Path, number: int) -> None:
    """And so does what they started. As at a terminal, the signal goes to the whole group; only the rank reports it."""
    environment = leftovers.environment()
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    pid = int(float(rank.stdout.readline()))
    while len(_started(tmp_path)) < 2:  # then the function is busy, and reads nothing from its rank
        time.sleep(0.01)
    os.killpg(rank.pid, number)
    _, err = rank.communicate(timeout=LONG_S)
    assert err.count("KeyboardInterrupt") == (number == signal.SIGINT)
    _assert_gone([pid, *_started(tmp_path)])


def test_the_process_shares_nothing_with_its_rank(rewards: Callable[..., Rewards], tmp_path: Path) -> None:
    """Neither open files, also those that children inherit, nor mapped memory."""
    mine = os.memfd_create("odc-heap-of-this-test", 0)
    os.set_inheritable(mine, True)
    scored = rewards("pid")
    pid = int(_score(scored, ["p"])[0][0])
    links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    os.close(mine)
    assert sum(link.startswith("socket:") for link in links) == 1
    assert not [link for link in links if "odc-heap" in link]
    assert "memfd:" not in Path(f"/proc/{pid}/maps").read_text()
    scored.close()
    assert not psutil.pid_exists(pid)
