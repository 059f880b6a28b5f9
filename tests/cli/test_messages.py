"""What errors tell, and what the command says to words that it does not know."""

from __future__ import annotations

import pickle
import re
from dataclasses import fields

import pytest

from odc_triton import DeadlineExceeded, MinibatchFailed, RankLost, __version__
from odc_triton.base.errors import RolloutFailed, describe, in_a_line
from odc_triton.jobs.options.names import _NAMES, instead
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.pairs_options import DpoOptions
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.tools.cli import command
from odc_triton.tools.cli.command import main, make_parser

OF_TRL = (
    "output_dir learning_rate per_device_train_batch_size gradient_accumulation_steps max_length model_name_or_path "
    "use_peft bf16 batch_size num_train_epochs dataset_name save_steps logging_steps lora_r load_in_4bit packing "
    "num_generations beta"
)


@pytest.mark.parametrize("kind", [SftOptions, GrpoOptions])
def test_names_of_other_trainers(kind: type) -> None:
    """Each hint names an option that the command has, or says that there is none."""
    here = [each.name for each in fields(kind)]
    for name in OF_TRL.split():
        if kind is SftOptions and name in ("num_generations", "beta"):
            continue
        hint = instead(name, here)
        assert re.search(rf"; {name} is ({'|'.join(here)}) here|; there is no {name} here: .", hint), hint
        assert "did you mean" not in hint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch_dtype", "dtype here, fp32 or bf16"),
        ("fp16", "dtype here, fp32 or bf16"),
        ("warmup_ratio", "warmup_steps here, in steps, not as a ratio"),
        ("use_peft", "lora_rank here, a number; without it all is trained"),
        ("max_length", "token_cap here, of a pack; see --truncate"),
    ],
)
def test_a_hint_says_what_is_meant_otherwise(name: str, says: str) -> None:
    assert says in instead(name, [each.name for each in fields(SftOptions)])


@pytest.mark.parametrize("words", ["--rank 2", "--max 1", "--clip 0.2", "--lora-r 8", "--optim adamw"])
def test_shortened_options_are_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They would be others: --ranks, --max-skipped."""
    with pytest.raises(SystemExit) as stopped:
        main(["train", "sft", "--data", "x", "--out", "y", *words.split()])
    assert stopped.value.code == 2
    assert "unrecognized arguments: " + words.split()[0] in capsys.readouterr().err


def test_every_option_that_a_hint_names_exists() -> None:
    kinds = (SftOptions, GrpoOptions, DpoOptions)
    known = {each.name for kind in kinds for each in fields(kind)} | {"ranks"}
    assert {option for options, _ in _NAMES.values() for option in options.split()} <= known


def test_errors_can_be_pickled() -> None:
    for error in (RankLost([1], "x"), DeadlineExceeded([0, 2], "y"), MinibatchFailed(3, {1: "ValueError: z"})):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.ranks == error.ranks


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("short"), "ValueError: short"),
        (_Unspeakable(), r"_Unspeakable: \(its text can't be made: ValueError\)"),
        (ValueError("a" * 30_000_000 + "z"), r"ValueError: a{2000} … \(29,996,001 characters left out\) … a{1999}z"),
    ],
    ids=["short", "unspeakable", "30 MB"],
)
def test_an_error_is_told_in_few_words(error: Exception, said: str) -> None:
    assert re.fullmatch(said, describe(error))


def test_only_a_traceback_keeps_its_lines() -> None:
    trace = "\nTraceback (most recent call last):\n  File \"mine.py\", line 6, in bad\nKeyError: 'white'"
    assert in_a_line(RolloutFailed([0], f"a reward\n  raised{trace}")) == f"a reward raised{trace}"
    assert in_a_line(KeyError("a\nb")) == r"KeyError: 'a\nb'"


def test_the_last_line_of_a_failed_command_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(options: object) -> int:
        raise RolloutFailed([0], "a reward raised\nTraceback (most recent call last):\nKeyError: 'white'")

    monkeypatch.setattr(command, "_doctor", failed)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == ["KeyError: 'white'", "odc-triton: a reward raised"]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"odc-triton {__version__}\n"


def test_help_has_the_commands_in_the_order_of_use() -> None:
    (commands,) = (action.choices for action in make_parser()._actions if isinstance(action.choices, dict))
    wanted = "demo run new train data sweep export bench simulate profile tune doctor"
    assert [*commands] == wanted.split()


SFT = ["train", "sft", "--data", "x", "--out", "y"]
SCRATCH = [*SFT, "--init", "c.json", "--tokenizer", "t"]
UNKNOWN = "unrecognized arguments: "


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SFT, "--token-capp", "8"], f"{UNKNOWN}--token-capp 8; did you mean --token-cap?"),
        (
            ["train", "grpo", "--eval-fraction", "0.1"],
            f"{UNKNOWN}--eval-fraction 0.1; --eval-fraction is of odc-triton train sft, odc-triton train dpo, "
            f"odc-triton train orpo, odc-triton train reward, not of odc-triton train grpo\n",
        ),
        (
            [*SFT, "--output-dir", "x", "--bf16", "--packing"],
            f"{UNKNOWN}--output-dir x --bf16 --packing; --output-dir is --out here; --bf16 is --dtype here, fp32 or "
            f"bf16; there is no --packing here: samples are always packed, up to --token-cap\n",
        ),
        (["train", "grpo", "--batch-size=8"], "; --batch-size is --prompts-per-rank here, of a step: the product"),
        ([*SFT, "--beta", "1"], "; --beta is of odc-triton train dpo, odc-triton train orpo, not of "),
        (["train", "grpo", "--beta", "1"], "; --beta is --kl here\n"),
        ([*SFT, "--ranks", "0"], "--ranks is 0; give at least 1"),
        ([*SFT, "--ranks", "100000"], "--ranks is 100000 and there "),
        ([*SFT, "--init", "c.json", "--model", __file__], "give either --model or --init"),
        ([*SFT, "--model", __file__], f"--model is {__file__}, a file: give the model's folder or hub id"),
        ([*SCRATCH, "--out", ""], "--out is empty; give a folder"),
        ([*SCRATCH, "--seed", str(2**63)], f"--seed is {2**63}; it must fit in 64 bits"),
        (
            [*SCRATCH, "--split-sequences", "--replicas", "2", "--balance", "queue"],
            "only by --balance mini; it is queue",
        ),
        (["tune", "--tokens", "5", "--init", __file__, "--folder", __file__], f"--folder is {__file__}, which is a f"),
        (["simulate", "--lengths", "aime", "--minibatch", "4,99999999999"], "--minibatch has 99999999999: give at m"),
    ],
)
def test_wrong_words_and_values(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.startswith(f"usage: odc-triton {words[0]}")
