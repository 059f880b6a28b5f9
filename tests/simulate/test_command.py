"""`odc-triton simulate`: what it prints and writes, its ranking, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from odc_triton.tools.cli.command import main
from odc_triton.tools.simulate.hardware import DEVICES
from odc_triton.tools.simulate.models import MODELS, Model
from odc_triton.tools.simulate.study import (
    SETTINGS,
    Row,
    advice,
    make_job,
    named_lengths,
    rank_settings,
    usual_links,
    verdict,
)
from tests.support import slow

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs the command; returns its status, what it printed, and its errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        try:
            status = main(["simulate", *map(str, arguments)])
        except SystemExit as left:  # argparse's way out
            status = int(left.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def rows_of(samples: int = 4, *, memory_gb: float = 1e9, gpus: int = 8, nodes: int = 1, **options: object) -> list[Row]:
    model, kind = Model.find("qwen2.5-7b"), DEVICES["a100"]
    job = make_job(model, kind, usual_links(kind, gpus // nodes, nodes=nodes), **options)
    return rank_settings(
        named_lengths("longalign", 2000), [samples], job=job, token_cap=65_536, memory_gb=memory_gb, trials=4
    )


def test_a_file_of_lengths_to_a_table_and_images(say: Say, tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, named_lengths("aime", 200))))
    out = tmp_path / "out"
    status, text, err = say(
        "--lengths", lengths, "--model", "qwen2.5-1.5b", "--gpus", 4, "--minibatch", "1,4", "--trials", 2, "--out", out
    )
    assert (status, err) == (0, "")
    assert "200 sequences of" in text
    assert "1 samples per GPU: " in text
    assert "4 samples per GPU: " in text
    assert all(text.count(f"| {name} ") == 2 for name in SETTINGS)
    assert (out / "table.md").read_text() in text + "\n"
    told = json.loads((out / "simulate.json").read_text())
    assert len(told) == 2 * len(SETTINGS)
    assert all(len(row["idle"]) == 4 and row["step_s"] > 0 for row in told)
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((out / "trace.json").read_text())
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"} <= set(SETTINGS)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (("--split-sequences",), "ODC + LB-Split"),
        slow(("--lora-rank", 4, "--runs", 2), "ODC, a run per GPU"),
        (("--share-prefixes", "--group", 8, "--prompt-tokens", 9000), "ODC + shared prefixes"),
    ],
)
def test_rows_on_request(say: Say, options: tuple, name: str) -> None:
    given = ("--lengths", "chat", "--model", "qwen2.5-0.5b", "--gpus", 2, "--minibatch", 8, "--trials", 1)
    assert [f"| {name} " in say(*given, *more)[1] for more in ((), options)] == [False, True]


def test_only_the_usual_speed_between_nodes_is_derated() -> None:
    assert usual_links(DEVICES["h100"], 8, nodes=2).nic_gbs == 0.8 * 50
    assert usual_links(DEVICES["h100"], 8, nodes=2, nic_gbs=7.0).nic_gbs == 7.0


def test_the_ranking() -> None:
    rows = rows_of()
    times = [row.outcome.step_s for row in rows]
    assert times == sorted(times)
    base = next(row for row in rows if row.name == "FSDP2 + LB-Micro")
    assert base.speedup == 1.0
    assert all(row.speedup == pytest.approx(base.outcome.step_s / row.outcome.step_s) for row in rows)
    assert "ODC + LB-Mini is" in verdict(rows)
    assert "`odc-triton train sft --balance mini --samples-per-rank 4`" in advice(rows)
    slowed = [replace(row, outcome=replace(row.outcome, seconds=9 * row.outcome.seconds)) for row in rows[:4]]
    late = sorted([*slowed, *rows[4:]], key=lambda row: row.outcome.step_s)
    assert verdict(late).startswith("4 samples per GPU: FSDP2")
    assert "stay with it" in advice(late)


def test_what_does_not_fit_comes_last_and_is_no_baseline() -> None:
    rows = rows_of(memory_gb=60)
    assert [row.fits for row in rows] == sorted((row.fits for row in rows), reverse=True)
    late = [row.name for row in rows if not row.fits]
    assert late == ["FSDP2 no reshard + LB-Mini"]
    assert late[0] not in verdict(rows)
    assert "ODC does not fit" in verdict(rows_of(memory_gb=1))


def test_parity_at_one_sample_and_gain_at_four() -> None:
    for samples, low, high in ((1, 0.97, 1.03), (4, 1.08, 1.6)):
        rows = {row.name: row for row in rows_of(samples)}
        assert low < rows["ODC + LB-Mini"].speedup < high


def test_a_slow_rank_is_met_by_the_queue() -> None:
    rows = {row.name: row.outcome.step_s for row in rows_of(8, slow={0: 1.3})}
    assert rows["ODC + LB-Mini"] / rows["ODC + queue"] > 1.1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (
            ("--lengths", "nowhere.txt"),
            1,
            "'nowhere.txt' is neither a file nor one of chat, longalign, swe-smith, aime",
        ),
        (("--token-cap", 1000), 1, "are longer than --token-cap 1000 (the longest: "),
        (("--gpus", 9, "--nodes", 2), 2, "9 gpus don't divide by 2 nodes: give a multiple of 2"),
        (("--model", "qwen2.5-7b", "--init", __file__), 2, "give either --model or --init"),
        (("--init", "nowhere.json"), 2, "--init is nowhere.json: there is no such file"),
        (("--gpus", 0), 2, "gpus is 0; give at least 1"),
        (("--trials", 0), 2, "trials is 0"),
        (("--minibatch", "1,0"), 2, "minibatch has '0'"),
        (("--minibatch", "four"), 2, "minibatch has 'four'"),
        (("--minibatch", ","), 2, "minibatch is empty"),
        (("--token-cap", 0), 2, "--token-cap is 0"),
        (("--efficiency", "nan"), 2, "efficiency is nan"),
        (("--nic-gbs", "inf"), 2, "--nic-gbs is inf"),
        (("--slow", "nan"), 2, "slow is nan"),
        (("--runs", 8), 2, "--runs are of adapters over one base: give --lora-rank too"),
        (("--share-prefixes",), 1, "--share-prefixes: --lengths aime has no tokens to compare"),
    ],
)
def test_what_is_refused(say: Say, arguments: tuple, status: int, message: str) -> None:
    told, _, err = say(*(() if arguments[0] == "--lengths" else ("--lengths", "aime")), *arguments)
    assert told == status
    assert message in err
    assert "Traceback" not in err


def test_options_as_other_commands_spell_them_and_as_before(say: Say, tmp_path: Path) -> None:
    """Checkpointing is a third of the work, which would show if one spelling had no effect."""
    config = tmp_path / "some" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps(MODELS["qwen2.5-0.5b"]))
    given = ("--lengths", "chat", "--gpus", 2, "--minibatch", 8, "--trials", 1)
    now, before, other = (
        say(*given, *more)
        for more in (
            ("--init", config, "--no-gradient-checkpointing"),
            ("--model", config, "--no-checkpointing"),
            ("--model", config.parent),
        )
    )
    assert now[0] == other[0] == 0
    assert now == before != other
    assert "--checkpointing" not in say("--help")[1]


def test_too_few_sequences(say: Say, tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("5 6 7 " * 7)
    status, out, _ = say("--lengths", few, "--gpus", 8, "--trials", 1)
    assert status == 0
    assert "minibatches of more than 2 per GPU are left out: the 21 sequences can't fill one\n" in out
