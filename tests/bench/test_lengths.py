"""`odc-triton bench --lengths`: its options, its samples, its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.suites.alone import Turn
from bench.suites.lengths import BASELINES, VARIANTS, chosen, setting_of
from bench.suites.lengths_report import Amounts, Result, gains, progress, text_of
from bench.variants import Ddp, Fsdp2, Fsdp2Micro, Fsdp2NoReshard, Odc, OdcSplit
from odc_triton.jobs.data.lengths import read_lengths
from odc_triton.jobs.data.records import Record
from odc_triton.tools.cli.bench import BenchOptions
from odc_triton.tools.cli.command import main
from tests.support.families import SIZES

CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | SIZES


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, (9, 40, 17, 6, 25, 12))))
    return str(path)


def test_lengths_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    path.write_text('7\n\n{"length": 4000}\n 12 \n{"text": "abc"}\n{"prompt": "ab", "completion": "abcde"}\n')

    def count(record: Record) -> int:
        return len(record.completion) + (0 if record.prompt is None else 100 * len(record.prompt))

    assert read_lengths(path, count_tokens=count) == [7, 4000, 12, 3, 205]
    assert read_lengths(path, 100, count) == [7, 100, 12, 3, 100]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("5\nseven\n", "line 2: 'seven' is not a length"),
        ("5\n-3\n", "line 2"),
        ('{"length": 1}', "line 1: 1 is not a length"),
        ('5\n{"length": 3', "line 2: not valid JSON"),
        ('{"words": 3}', "line 1: needs 'text'"),
        ('{"text": "hello"}', "line 1 has a text and no `length`: give --tokenizer"),
        ('{"text": ""}', "line 1 is a text of 1 tokens"),
        ("\n\n", "has no lengths"),
    ],
)
def test_wrong_lengths_are_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"lengths\.txt") as caught:
        read_lengths(path, count_tokens=(lambda record: 1) if text == '{"text": ""}' else None)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"init": None}, "either --model"),
        ({"init": "nowhere.json"}, "init is nowhere.json: there is no such file"),
        ({"token_cap": 1}, "--token-cap is 1"),
        ({"minibatches": 0}, "minibatches is 0"),
        ({"out": __file__}, "which is a file"),
    ],
)
def test_wrong_options(config: str, lengths: str, changes: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BenchOptions(**({"init": config, "lengths": lengths} | changes))


def test_more_ranks_than_gpus(config: str, lengths: str) -> None:
    wanted = BenchOptions(init=config, lengths=lengths, device="cuda")
    with pytest.raises(ValueError, match="--device is cuda with --ranks 4, and there are 2 GPUs here: give --ranks 2"):
        setting_of(wanted, 4, gpus=2)
    with pytest.raises(ValueError, match="--ranks 1, and there are no GPUs here: give --device cpu"):
        setting_of(wanted, 1, gpus=0)


def test_long_sequences_are_split_by_default_and_quickly() -> None:
    assert chosen(None) == VARIANTS
    assert OdcSplit in VARIANTS
    assert chosen(None, quick=True) == (Fsdp2, Fsdp2NoReshard, Odc, OdcSplit)
    assert chosen("ODC + split", quick=True) == (OdcSplit,)


def _result(kind: type, *turns: list[float], waited_s: float = 0.0, failure: str | None = None) -> Result:
    """Of turns with these seconds, in each of which one of two ranks waited for a core."""
    taken = [
        Turn(
            seconds=seconds,
            microbatches=[[1, 1]] * len(seconds),
            first_loss=1.0,
            peak_bytes=[1, 1],
            idle=0.5,
            parameters=1,
            waited_s=[[0.0, waited_s]] * len(seconds),
        )
        for seconds in turns
    ]
    return Result(name=kind.name, is_baseline=kind in BASELINES, turns=taken, failure=failure)


def test_each_gain_is_credited_to_its_cause() -> None:
    baseline, unsplit, split = _result(Fsdp2, [6.0, 6.0]), _result(Odc, [5.0, 5.0]), _result(OdcSplit, [4.0, 4.0])
    slow = _result(Ddp, [9.0, 9.0])
    found = gains([slow, baseline, unsplit, split])
    assert [(each["slow"], each["fast"], each["ratio"]) for each in found] == [
        (Fsdp2.name, Odc.name, 1.2),
        (Odc.name, OdcSplit.name, 1.25),
        (Fsdp2.name, OdcSplit.name, 1.5),
    ]
    text = text_of([slow, baseline, unsplit, split], Amounts(tokens=[1, 1], flops=[1.0, 1.0], ranks=2))
    assert f"{OdcSplit.name} is 1.25 (1.25 to 1.25) times as fast as {Odc.name}: long sequences are split" in text
    # Amid a round: over the minibatches that both have. What failed gained nothing.
    ahead = _result(Odc, [5.0, 5.0], [1.0, 1.0])
    assert [each["ratio"] for each in gains([baseline, ahead, _result(OdcSplit, [4.0], failure="no")])] == [1.2]
    assert gains([unsplit]) == []


@pytest.mark.parametrize(
    ("turns", "failed", "waited_s", "said"),
    [
        # Of 2 variants and 3 rounds: turns of each, and after 60 s the number of this one, the time left, the word.
        ((1, 0), False, 0.9, "  [round 1 of 3, turn 1 of 6] it; about 0:05:00 left"),
        (
            (1, 1),
            False,
            0.9,
            "  [round 1 of 3, turn 2 of 6] it; about 0:02:00 left\nAfter the first round: The machine was not quiet: ",
        ),
        ((2, 1), True, 0.0, "  [round 2 of 3, turn 4 of 5] it; about 0:00:15 left"),
        ((3, 3), False, 0.9, "  [round 3 of 3, turn 6 of 6] it"),
    ],
)
def test_progress(turns: tuple[int, int], failed: bool, waited_s: float, said: str) -> None:
    results = [_result(kind, *[[1.0]] * n, waited_s=waited_s) for kind, n in zip((Fsdp2, Odc), turns, strict=True)]
    results[1].failure = "no" if failed else None
    found = progress(results, 3, "it", 60.0)
    assert found.startswith(said)
    assert found.count("\n") == said.count("\n")


@pytest.mark.slow
def test_the_command(config: str, lengths: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "deep" / "out"
    names = [kind.name for kind in (Fsdp2Micro, Ddp, Odc, OdcSplit)]
    given = ["--lengths", lengths, "--init", config, "--out", str(out), "--rounds", "1", "--minibatches", "2"]
    given += ["--ranks", "2", "--samples-per-rank", "2"]
    assert main(["bench", *given, "--variants", ",".join(names)]) == 0
    said = capsys.readouterr().out
    assert "2 ranks on cpu, fp32" in said
    assert "1 round of 4 variants, each of 1 minibatch to warm up and 2 timed ones" in said
    assert "  [round 1 of 1, turn 4 of 4] ODC + split: " in said
    assert f"times as fast as {Odc.name}: long sequences are split over ranks" in said
    data = json.loads((out / "lengths.json").read_text())
    assert list(data["variants"]) == names
    assert data["fastest_baseline"] in [kind.name for kind in BASELINES]
    assert {"commit", "hardware", "versions", "options"} <= data.keys()
    for found in data["variants"].values():
        assert found["failure"] is None
        assert found["tokens_per_s_per_rank"] > 0
        assert found["mfu"] is None
        assert len(found["turns"][0]["seconds"]) == 2
    assert data["loss_spread"] < 1e-4  # fp32 sums in another order
    table = (out / "lengths.md").read_text()
    assert all(name in table and name in said for name in names)
    assert sorted(path.name for path in out.iterdir()) == ["lengths.json", "lengths.md"]
