"""Sample generations at an evaluation, compared with plain transformers; what a record's prompt is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from odc_triton.data.dataset import DataOptions, TokenizedDataset
from odc_triton.data.tokenizer import TextEncoder, load_tokenizer, to_transformers
from odc_triton.rl.generation import end_tokens_of
from odc_triton.train.metrics import read_metrics
from odc_triton.train.samples import prompted
from tests.support import jobs
from tests.support.chats import CHATML
from tests.support.sft_case import case, write_case
from tests.support.tokenized import tokenize_file

COUNT, TOKENS = 3, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_case(tmp_path_factory.mktemp("samples"))
    held_out = (folder / "data.jsonl").read_text().splitlines()[:5]
    (folder / "held_out.jsonl").write_text("".join(line + "\n" for line in held_out))
    return folder


def plain(model: nn.Module, tokenizer: Any, data: TokenizedDataset) -> list[dict[str, Any]]:
    """What a whole model says, one prompt at a time, token by token."""
    found = []
    for index in range(COUNT):
        ids, labels = (torch.from_numpy(data[index][name]) for name in ("input_ids", "labels"))
        start = int((labels != -100).nonzero()[0])
        row = ids[None, :start]
        for _ in range(TOKENS):
            with torch.no_grad():
                row = torch.cat([row, model(input_ids=row).logits[:, -1:].argmax(-1)], dim=1)
            if row[0, -1] in end_tokens_of(model, tokenizer):
                break
        parts = {"prompt": ids[:start], "completion": row[0, start:], "expected": ids[start:]}
        found.append({name: tokenizer.decode(part, skip_special_tokens=True) for name, part in parts.items()})
        found[-1]["ended"] = bool(row[0, -1] in end_tokens_of(model, tokenizer))
    return found


def test_greedy_completions_of_the_model_at_the_end(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    wanted = {"eval_data": str(folder / "held_out.jsonl"), "eval_samples": COUNT, "eval_sample_tokens": TOKENS}
    how = {"eval_every": 2, "fused_head": True, "replace_layers": True, "exact": True}
    assert jobs.run(2, case(folder, out=str(out), samples_per_rank=2, steps=3, **wanted, **how)) == [jobs.ENDED]
    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    data = tokenize_file(folder / "held_out.jsonl", TextEncoder.of(tokenizer), DataOptions(max_tokens=256))
    samples = read_metrics(out / "samples.jsonl")
    assert [line["step"] for line in samples] == [2] * COUNT + [3] * COUNT
    want = plain(model, to_transformers(tokenizer), data)
    assert [{k: v for k, v in line.items() if k != "step"} for line in samples[-COUNT:]] == want
    assert len({each["completion"] for each in want}) > 1, "all alike: the comparison says little"


class Data(list):
    """Records as (token ids, those that are learned)."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids, spans = super().__getitem__(index)
        ids = torch.tensor(ids).numpy()
        labels = 0 * ids - 100
        for start, end in spans:
            labels[start:end] = ids[start:end]
        return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("ids", "spans", "prompt", "expected"),
    [
        ([1, 2, 3, 4, 5], [(3, 5)], [1, 2, 3], [4, 5]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [(1, 3), (5, 7)], [1, 2, 3, 4, 5], [6, 7]),  # two turns of the assistant
        ([1, 2, 3, 4, 5], [(0, 5)], [1, 2], [3, 4, 5]),  # a text
        ([1, 2], [(0, 2)], [1], [2]),
        (list(range(100)), [(0, 100)], list(range(32)), list(range(32, 100))),
    ],
    ids=["completion", "conversation", "text", "shortest text", "long text"],
)
def test_where_a_record_is_cut(ids: list[int], spans: list, prompt: list[int], expected: list[int]) -> None:
    (found,) = prompted(Data([(ids, spans)]), most_tokens=40)
    assert (found.prompt, found.expected) == (prompt, expected)


def test_a_prompt_that_does_not_fit_is_left_out() -> None:
    data = Data([([1] * 9, [(8, 9)]), ([2] * 4, [(3, 4)]), ([3] * 6, [(5, 6)])])
    assert [each.prompt for each in prompted(data, most_tokens=5)] == [[2, 2, 2], [3] * 5]


def test_a_conversation_is_cut_after_the_header_of_its_last_answer(folder: Path) -> None:
    from odc_triton.data.chat import Conversation

    tokenizer = to_transformers(load_tokenizer(folder / "tokenizer.json"))
    tokenizer.chat_template = CHATML
    messages = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    messages = [{"role": role, "content": content} for role, content in messages]
    ((ids, spans),) = TextEncoder.of(tokenizer).chat.encode([Conversation(messages)], 999)
    (found,) = prompted(Data([(ids, spans)]), most_tokens=999)
    header = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(found.prompt) == header
    assert tokenizer.decode(found.expected).startswith("four")
