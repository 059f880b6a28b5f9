"""Columns of the data by other names, and chat templates in place of the tokenizer's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from odc_triton.jobs.data.prepared import prepare_data
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import open_source
from odc_triton.jobs.data.templates import TEMPLATES, with_template
from odc_triton.jobs.data.tokenizer import TextEncoder
from odc_triton.jobs.options.options import columns_of
from odc_triton.jobs.rl.prompts import read_prompts
from odc_triton.tools.cli.command import main
from tests.support.chats import CHATML, make_tokenizer
from tests.support.grpo_case import case
from tests.support.records import write_lines

GSM8K = {"question": "What is 2 + 3?", "answer": "It is 5.\n#### 5"}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(write_lines(tmp_path / "gsm8k.jsonl", GSM8K))


def test_columns_have_other_names(path: str, tmp_path: Path):
    tokenizer = make_tokenizer(CHATML)
    (prompt,) = read_prompts(path, tokenizer, most_tokens=99, columns={"prompt": "question"})
    assert (prompt.given, prompt.columns) == (GSM8K["question"], {"answer": GSM8K["answer"]})
    (record,) = open_source(path, columns := columns_of(["prompt=question", "completion=answer"]))
    assert (record.prompt, record.completion) == tuple(GSM8K.values())
    encoder = TextEncoder.of(tokenizer)
    swapped = {"completion": "question", "prompt": "answer"}
    files = {prepare_data(path, encoder, folder=tmp_path, columns=each).path for each in (columns, swapped, columns)}
    assert len(files) == 2
    assert main(["data", "inspect", path, "--tokenizer", "nowhere", "--map", "prompt"]) == 1


WRONG = {
    "prompt=qestion": r"gsm8k.jsonl, line 1: there is no 'qestion' .*it has 'question', 'answer'",
    "answer=question": r"has 'answer' already.*--map answer=question,other=answer",
    "prompt": r"--map is 'prompt'; give NAME=COLUMN",
    "prompt=question,prompt=answer": r"'question' and 'answer' the name 'prompt'",
    "a=question,b=question": r"'question' two names",
    "a=b=c": "give NAME=COLUMN",
}


@pytest.mark.parametrize(("given", "words"), WRONG.items())
def test_wrong_maps(path: str, given: str, words: str):
    with pytest.raises((DataError, ValueError), match=words):
        list(open_source(path, columns_of(given)).rows())


def test_templates_and_maps_are_of_a_runs_identity(tmp_path: Path):
    file = tmp_path / "t.jinja"
    file.write_text(TEMPLATES["chatml"])
    (tmp_path / "prompts.jsonl").touch()
    one, other, changed = (
        case(tmp_path, chat_template=str(each), map=("a=b,c=d",)).identity(2) for each in ("chatml", file, "llama3")
    )
    assert one["contents"] == other["contents"] != changed["contents"]
    assert one["map"] == case(tmp_path, map=("c=d", "a=b")).identity(2)["map"] == ["a=b", "c=d"]


def test_a_prompt_is_text_that_utf_8_can_hold(tmp_path: Path):
    path = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b\ud800"})
    with pytest.raises(DataError, match=r"prompts.jsonl, line 2: 'prompt' has half a surrogate pair at character 1"):
        read_prompts(str(path), make_tokenizer(None), most_tokens=99)


def test_wrong_templates(tmp_path: Path):
    file = tmp_path / "t.jinja"
    file.write_text("{% for message in messages %}\n{{ message. }}")
    with pytest.raises(ValueError, match=r"t.jinja, line 2, is not valid jinja"):
        with_template(make_tokenizer(None), str(file))
    with pytest.raises(ValueError, match="did you mean chatml"):
        case(tmp_path, chat_template="chatlm")
    chats = write_lines(tmp_path / "chats.jsonl", {"prompt": [{"role": "user", "content": "Hi"}]})
    tokenizer = with_template(make_tokenizer(None), "chatml")
    (prompt,) = read_prompts(str(chats), tokenizer, most_tokens=99)
    assert tokenizer.decode(prompt.ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
