"""`odc-triton data inspect`: counts against plain loops, and what it prints."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.jobs.data.dataset import DataOptions
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import RecordFiles
from odc_triton.plan.cost import CostModel
from odc_triton.tools.cli.command import main
from odc_triton.tools.cli.inspection import inspect_data
from tests.support.chats import CHATML, make_tokenizer
from tests.support.records import CHARACTERS, RECORDS, write_lines
from tests.support.tokenized import tokenize_file

CHAT = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "yes\x1b[2J"}]}


@settings(max_examples=40)
@given(records=RECORDS, cap=st.integers(2, 12))
def test_counts_are_those_of_the_preparation(tmp_path_factory, records, cap):
    path = write_lines(tmp_path_factory.getbasetemp() / "inspect.jsonl", *records)
    found = inspect_data(RecordFiles([path]), CHARACTERS, token_cap=cap, cost=CostModel.paper_7b(), vocabulary=100)
    data = tokenize_file(path, CHARACTERS)
    assert found.lengths.tolist() == data.lengths.tolist()
    assert found.summary == data.summary
    assert found.forms.get("text", 0) == sum("text" in record for record in records)
    assert found.tokens_outside == sum(int(token) >= 100 for sample in data for token in sample["input_ids"])
    too_long = int((data.lengths > cap).sum())
    try:
        cut = tokenize_file(path, CHARACTERS, DataOptions(max_tokens=cap)).summary
    except DataError:
        assert found.too_long_nothing_left == too_long == found.summary.samples
    else:
        assert too_long == cut.truncated + found.too_long_nothing_left
        assert found.too_long_nothing_left == cut.dropped_no_target - found.summary.dropped_no_target
    assert found.example == []  # these characters can't be decoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    write_lines(folder / "data$1.jsonl", {"text": "yes " * 50}, CHAT, CHAT, {"prompt": "and", "completion": "no"})
    make_tokenizer(CHATML).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 296}))
    return folder


def page(capsys, *arguments, status=0) -> str:
    assert main(["data", "inspect", *map(str, arguments)]) == status
    return capsys.readouterr().out


def test_page(folder, capsys):
    given = [folder / "data$1.jsonl", "--tokenizer", folder / "model"]
    text = page(capsys, *given, "--token-cap", 30, "--model", folder / "model", status=1)  # one token is outside
    for line in (
        r"data\$1\.jsonl: 4 records \(1 of text, 2 of messages, 1 of prompt and completion\)",
        r"4 samples, \d+ tokens, \d+ of them learned \(\d+%\)",
        r" +median +\d+",
        r"1 samples \(25.0%\) are longer than the cap of 30 tokens: truncating cuts off \d+ tokens and leaves 0 of",
        r"\d tokens are outside the model's vocabulary of 296 \(the largest is 296\)",
    ):
        assert re.search(f"(?m)^.*{line}", text), line
    assert text.endswith("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n«yes\\x1b[2J<|im_end|>\n»\n")
    assert "\x1b" not in text
    assert "no sample is longer than the cap of 4,096 tokens" in page(capsys, *given)


def test_several_files_and_their_weights(folder, capsys):
    write_lines(folder / "more.jsonl", *[{"text": "yes"}] * 6)
    files = [folder / "data$1.jsonl", folder / "more.jsonl"]
    weights = ["--data-weight", 1.5, "--data-weight", 0.5]
    text = page(capsys, *files, *weights, "--tokenizer", folder / "model")
    counts = [int(found) for found in re.findall(r"samples, (\d+) tokens", text)]
    wanted = [(6, 1.5 * counts[0]), (3, counts[1] / 2)]
    for line, file, weight, (samples, tokens) in zip(text.splitlines()[-2:], files, weights[1::2], wanted, strict=True):
        share = tokens / sum(each for _, each in wanted)
        numbers = rf"{samples} samples \({samples / 9:.1%}\), +{tokens:.0f} tokens \({share:.1%}\)"
        assert re.search(rf"{numbers}  of .*{re.escape(file.name)}, weight {weight:g}$", line)


@pytest.mark.parametrize(("weights", "said"), [(["1"], "1 weights and 2 data sets"), (["1", "-1"], "weight is -1.0")])
def test_weights_are_checked_before_files_are_read(weights, said, capsys):
    given = [word for weight in weights for word in ("--data-weight", weight)]
    assert main(["data", "inspect", "none.jsonl", "none.jsonl", "--tokenizer", "none", *given]) == 1
    assert said in capsys.readouterr().err


def test_what_shared_prefixes_save(folder, capsys):
    """By the model's cost, of samples cut off at the cap; a token is a letter here, or a mark."""
    asked = [{"prompt": "w" * 200, "completion": letter * 50} for letter in "abc"]
    write_lines(folder / "asked.jsonl", *asked, {"prompt": "v" * 31, "completion": "a"})
    config = json.loads((folder / "model" / "config.json").read_text()) | {"vocab_size": 1000}
    linear = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 10**6}
    (folder / "wide.json").write_text(json.dumps(config | linear))
    given = [folder / "asked.jsonl", "--model", folder / "wide.json", "--tokenizer", folder / "model", "--token-cap"]
    for cap, total in ((500, 3 * 253 + 35), (220, 3 * 220 + 35)):
        line = re.search(
            r"402 tokens \((.*)%\) are not learned and begin .*, (.*)% of the time", page(capsys, *given, cap)
        )
        assert float(line[1]) == pytest.approx(40200 / total, abs=0.05)
        assert float(line[2]) == pytest.approx(40200 / total, rel=0.02)  # nearly all is work per token


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["broken.jsonl", "--tokenizer", "model"], "broken.jsonl, line 2: not valid JSON"),
        (["data$1.jsonl", "--tokenizer", "model", "--token-cap", "1"], "--token-cap is 1; give at least 2"),
        (["data$1.jsonl", "--tokenizer", "empty.jsonl.json"], "there is no such file"),
    ],
)
def test_unusable_data_ends_with_one_line(folder, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text"')
    assert main(["data", "inspect", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(f"odc-triton: .*{message}.*\n", printed.err)
