"""`odc-triton data inspect`: counts against plain loops, and what it prints."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_triton.cli.command import main
from odc_triton.data.dataset import DataOptions
from odc_triton.data.inspection import inspect_data
from odc_triton.data.records import DataError
from odc_triton.data.sources import RecordFiles
from tests.support.chats import CHATML, make_tokenizer
from tests.support.records import CHARACTERS, RECORDS, write_lines
from tests.support.tokenized import tokenize_file

CHAT = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "yes\x1b[2J"}]}


@settings(max_examples=40, deadline=None)
@given(records=RECORDS, cap=st.integers(2, 12))
def test_counts_are_those_of_the_preparation(tmp_path_factory, records, cap):
    path = write_lines(tmp_path_factory.getbasetemp() / "inspect.jsonl", *records)
    found = inspect_data(RecordFiles([path]), CHARACTERS, token_cap=cap, vocabulary=100)
    data = tokenize_file(path, CHARACTERS)
    lengths = data.lengths.tolist()
    assert found.lengths == {
        **{str(at): np.percentile(lengths, at) for at in (0, 5, 25, 50, 75, 90, 95, 99, 100)},
        "mean": pytest.approx(sum(lengths) / len(lengths)),
    }
    assert (found.records, found.samples) == (len(records), len(data))
    assert found.forms.get("text", 0) == sum("text" in record for record in records)
    assert (found.tokens, found.target_tokens) == (data.summary.tokens, data.summary.target_tokens)
    assert found.tokens_outside == sum(int(token) >= 100 for sample in data for token in sample["input_ids"])
    for shortest, longest, count in found.histogram:
        assert count == sum(shortest <= length <= longest for length in lengths)
    assert sum(count for *_, count in found.histogram) == len(data)
    try:
        cut = tokenize_file(path, CHARACTERS, DataOptions(max_tokens=cap)).summary
    except DataError:
        assert found.too_long_nothing_left == found.too_long == found.samples
    else:
        assert found.too_long == cut.truncated + found.too_long_nothing_left
        assert found.tokens_over_cap == sum(max(length - cap, 0) for length in lengths)
        assert found.too_long_nothing_left == cut.dropped_no_target - found.nothing_to_learn
    assert found.example == []  # these characters can't be decoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    write_lines(folder / "data$1.jsonl", {"text": "yes " * 50}, CHAT, CHAT, {"prompt": "and", "completion": "no"})
    make_tokenizer(CHATML).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 296}))
    return folder


def test_page(folder, capsys):
    command = ["data", "inspect", str(folder / "data$1.jsonl"), "--tokenizer", str(folder / "model")]
    assert main([*command, "--token-cap", "30", "--model", str(folder / "model")]) == 1  # one token is outside
    page = capsys.readouterr().out
    for line in (
        r"data\$1\.jsonl: 4 records \(1 of text, 2 of messages, 1 of prompt and completion\)",
        r"4 samples, \d+ tokens, \d+ of them learned \(\d+%\)",
        r" +median +\d+",
        r" +32 to +63 +1  #+ +over the cap",
        r"1 samples \(25.0%\) are longer than the cap of 30 tokens: truncating cuts off \d+ tokens and leaves 0 of",
        r"\d tokens are outside the model's vocabulary of 296 \(the largest is 296\)",
    ):
        assert re.search(f"(?m)^.*{line}", page), line
    assert page.endswith("<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\n«yes\\x1b[2J<|im_end|>\n»\n")
    assert "\x1b" not in page
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 1000}')
    assert main([*command, "--model", str(folder / "large")]) == 0
    assert "all token ids are within the model's vocabulary of 1,000" in capsys.readouterr().out


def test_several_files_and_their_weights(folder, capsys):
    (folder / "more.json").write_text(json.dumps([{"conversations": [{"from": "gpt", "value": "yes"}]}] * 6))
    files = [str(folder / "data$1.jsonl"), str(folder / "more.json")]
    assert main(["data", "inspect", *files, "--data-weight", "1.5", "--data-weight", "0.5"]) == 0
    page = capsys.readouterr().out
    assert "data$1.jsonl: 4 records (1 of text, 2 of messages, 1 of prompt and completion)" in page
    assert "more.json: 6 records (6 of conversations)" in page
    assert main(["data", "inspect", *files, "--data-weight", "1.5", "--data-weight", "0.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = (each["tokens"] for each in found["files"])
    assert second == 6 * len("yes")
    wanted = [(6, 1.5 * first), (3, second / 2)]
    for part, line, (samples, tokens) in zip(found["epoch"], page.splitlines()[-2:], wanted, strict=True):
        assert (part["samples"], part["tokens"]) == (samples, round(tokens))
        assert part["share_of_samples"] == samples / 9
        assert part["share_of_tokens"] == pytest.approx(tokens / sum(each for _, each in wanted))
        numbers = rf"{samples} samples \({samples / 9:.1%}\), +{round(tokens)} bytes \({part['share_of_tokens']:.1%}\)"
        assert re.search(rf"{numbers}  of .*{re.escape(part['data'])}, weight {part['weight']:g}$", line)


def test_what_shared_prefixes_save(folder, capsys):
    """By the model's cost, else by the paper's; of samples cut off at the cap."""
    asked = [{"prompt": "w" * 200, "completion": letter * 50} for letter in "abc"]
    write_lines(folder / "asked.jsonl", *asked, {"prompt": "v" * 31, "completion": "a"})
    config = json.loads((folder / "model" / "config.json").read_text())
    linear = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 10**6}
    (folder / "wide.json").write_text(json.dumps(config | linear))
    command = ["data", "inspect", str(folder / "asked.jsonl"), "--model", str(folder / "wide.json")]
    for cap, shared, total in ((500, 2 * 199, 3 * 251 + 33), (220, 2 * 199, 3 * 220 + 33)):
        assert main([*command, "--token-cap", str(cap), "--json"]) == 0
        (found,) = [json.loads(capsys.readouterr().out)]
        assert found["shared_tokens"] == shared
        assert found["shared_time"] == pytest.approx(shared / total, rel=0.01)  # nearly all is work per token
        assert main([*command, "--token-cap", str(cap)]) == 0
        line = rf"{shared} bytes \({shared / total:.1%}\) are not learned and begin another sample too: .*% of the time"
        assert re.search(line, capsys.readouterr().out)
    assert main(command[:3]) == 0
    assert "saves these at most" in capsys.readouterr().out
    assert main([*command, "--token-cap", "150"]) == 0  # which leaves nothing to learn but the last one's
    assert "no two samples begin with enough of the same tokens" in capsys.readouterr().out


def test_json_and_bytes(folder, capsys):
    assert main(["data", "inspect", str(folder / "data$1.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] == "bytes"
    # Text and completion with an end of one; a conversation is its texts.
    assert found["tokens"] == 201 + 2 * len("whyyes\x1b[2J") + len("andno") + 1
    assert found["target_tokens"] == 200 + 2 * len("yes\x1b[2J") + len("no") + 1
    assert found["lengths"]["100"] == 201
    assert found["vocabulary"] is None
    assert main(["data", "inspect", str(folder / "data$1.jsonl")]) == 0
    page = capsys.readouterr().out
    assert "give --tokenizer to count tokens" in page
    assert "no sample is longer than the cap of 4,096 bytes" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["broken.jsonl"], "broken.jsonl, line 2: not valid JSON"),
        (["data$1.jsonl", "--token-cap", "1"], "--token-cap is 1; give at least 2"),
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
