"""Forms of records: what each becomes, what is learned of it, and what is refused."""

from __future__ import annotations

import json

import pytest

from odc_triton.jobs.data.forms import record_of
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.chats import THINKING, make_tokenizer
from tests.support.records import samples_of, tokenized

ASK, SAY = {"role": "user", "content": "why"}, {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be kind"}
FROM = [{"from": "human", "value": "why"}, {"from": "gpt", "value": "yes"}]
TOOL = {"name": "add", "parameters": {"type": "object"}}
CALL = {"name": "add", "arguments": {"a": 1}}
CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]}


def read(fields: object):
    return record_of("data, line 1", fields)


@pytest.mark.parametrize(
    ("fields", "form", "prompt", "completion"),
    [
        ({"text": "a"}, "text", None, "a"),
        ({"prompt": "a", "completion": "b"}, "prompt and completion", "a", "b"),
        ({"instruction": "add", "input": "1", "output": "2"}, "Alpaca", "add\n\n1", "2"),
        ({"instruction": "say", "input": "", "output": "é"}, "Alpaca", "say", "é"),
        ({"instruction": "say", "output": "é", "system": "", "history": []}, "Alpaca", "say", "é"),
        ({"instruction": "a", "input": None, "output": "b", "text": "### a: b", "prompt": "a"}, "Alpaca", "a", "b"),
    ],
)
def test_text(fields, form, prompt, completion):
    record = read(fields)
    assert (record.form, record.prompt, record.completion, record.messages) == (form, prompt, completion, None)
    assert record.characters == len(prompt or "") + len(completion)


UNLEARNED = {**SAY, "weight": 0}


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"messages": [ASK, SAY]}, [ASK, SAY]),
        ({"messages": [ASK, SAY], "prompt": "why"}, [ASK, SAY]),
        ({"messages": [ASK, {**ASK, "role": "user2"}, SAY]}, [ASK, {**ASK, "role": "user2"}, SAY]),
        ({"messages": json.dumps([ASK, SAY])}, [ASK, SAY]),
        ({"messages": FROM}, [ASK, SAY]),
        ({"messages": [{"role": "human", "content": "why"}, {"role": "gpt", "content": "yes"}]}, [ASK, SAY]),
        ({"conversations": FROM}, [ASK, SAY]),
        ({"conversations": json.dumps(FROM), "system": "be kind"}, [SYSTEM, ASK, SAY]),
        ({"conversations": [{"from": "system", "value": "be kind"}, *FROM], "system": ""}, [SYSTEM, ASK, SAY]),
        (
            {
                "conversations": [
                    FROM[0],
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "1"},
                    {"from": "function_call", "value": json.dumps([CALL, {**CALL, "arguments": '{"a": 1}'}])},
                    {"from": "tool", "value": "2"},
                    FROM[1],
                ],
                "tools": json.dumps([TOOL]),
            },
            [
                ASK,
                CALLS,
                {"role": "tool", "content": "1"},
                {**CALLS, "tool_calls": CALLS["tool_calls"] * 2},
                {"role": "tool", "content": "2"},
                SAY,
            ],
        ),
        ({"conversations": [{**each, "role": None, "content": None} for each in FROM]}, [ASK, SAY]),
        ({"messages": [ASK, {**CALLS, "tool_calls": json.dumps(CALLS["tool_calls"])}]}, [ASK, CALLS]),
        ({"messages": [ASK, {**CALLS, "tool_calls": CALL}]}, [ASK, CALLS]),
        ({"messages": [ASK, {**CALLS, "tool_calls": [{"name": None, **CALLS["tool_calls"][0]}]}]}, [ASK, CALLS]),
        (
            {"messages": [ASK, {**CALLS, "tool_calls": [{"id": "7", **CALL}]}]},
            [ASK, {**CALLS, "tool_calls": [{"id": "7", **CALLS["tool_calls"][0]}]}],
        ),
        ({"messages": [ASK, {**SAY, "tool_calls": "[]"}]}, [ASK, SAY]),
        ({"prompt": [SYSTEM, ASK], "completion": [SAY]}, [SYSTEM, ASK, SAY]),
        ({"prompt": [ASK, UNLEARNED, ASK], "completion": [SAY]}, [ASK, UNLEARNED, ASK, SAY]),
        ({"prompt": [ASK, SAY, ASK], "completion": [SAY, ASK, SAY]}, [ASK, SAY] * 3),
        ({"prompt": FROM[:1], "completion": FROM[1:], "tools": [TOOL]}, [ASK, SAY]),
        ({"messages": [ASK, SAY], "tools": [json.dumps(TOOL)]}, [ASK, SAY]),
    ],
)
def test_messages(fields, messages):
    record = read(fields)
    learned_from = len(fields["prompt"]) if "completion" in fields else 0
    assert (record.messages, record.learned_from) == (messages, learned_from)
    assert record.tools == ([TOOL] if "tools" in fields else None)
    assert (record.prompt, record.completion) == (None, "")
    listed = "prompt and completion as messages"
    assert record.form == next(name for name in fields if name in ("messages", "conversations", "prompt")).replace(
        "prompt", listed
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a", "conversations": FROM}, "has 'text' and also 'conversations'; keep one form"),
        ({"instruction": "a", "input": "b"}, r"needs .*'output' \(Alpaca\); it has 'instruction', 'input'"),
        ({"instruction": "a", "output": "b", "system": "c"}, "has 'system' next to 'instruction'.*as 'messages'"),
        ({"conversations": []}, "'conversations' must be a list of at least one message, not an empty list"),
        ({"conversations": [FROM[0], {"from": "gpt"}]}, "message 1 needs .*'from' and 'value'; it has 'from'"),
        ({"conversations": [{"from": "function_call", "value": "add(1)"}]}, "a function_call, whose .*not 'add"),
        ({"conversations": [{"from": "system", "value": "a"}, *FROM], "system": "b"}, "keep one of them"),
        ({"prompt": "a", "completion": [SAY]}, "'completion' is a list and 'prompt' is a string; give both as text"),
        ({"prompt": True, "completion": "a"}, "'prompt' must be a string, not true or false"),
        (
            {"messages": [ASK, UNLEARNED, ASK, SAY]},
            "message 1 has weight 0, and all turns of the assistant are learned",
        ),
        ({"messages": [ASK, SAY | {"role": "Assistant"}]}, "message 1 has the role 'Assistant': write 'assistant'"),
        ({"messages": [ASK, SAY | {"role": "asistant"}]}, "message 1 has the role 'asistant': write 'assistant'"),
        ({"messages": [ASK, SAY | {"role": "assistant2"}]}, "message 1 has the role 'assistant2': write 'assistant'"),
        ({"messages": [ASK, {**CALLS, "tool_calls": "add(1)"}]}, "message 1: 'tool_calls' must be .*not 'add"),
        ({"messages": [ASK, SAY], "tools": "add"}, "'tools' must be a list of objects.*not 'add'"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(DataError, match=f"data, line 1: .*{message}") as caught:
        read(fields)
    assert not any(word in str(caught.value) for word in ("NoneType", "dict", "a str,", "DataError"))


@pytest.mark.parametrize(
    ("name", "learned", "unlearned"),
    [
        ("loss", (True, 1, "1.0", None, 0.734), (False, 0, "false")),
        ("loss_mask", (1, "true"), (0, "f", [0, 1])),
        *(
            (name, (False, 0, []), (True, 1))
            for name in ("dont_train", "do_not_train", "not_trained", "mask", "skip_loss")
        ),
        *(
            (name, (0, 3, 0.7, "0", True), ())
            for name in ("target_tokens", "loss_per_token", "trained_at", "weight_class")
        ),
        ("weight", (1, 1.0, "1"), (0, 0.0, "0", "0.0", 2, 0.5)),
        ("train", (True, "true", "a word"), (False, "no")),
        ("training_detail", ("",), ([{"begin": 0, "end": 1, "train": False}],)),
        ("trainable", (True,), (False,)),
        ("loss_weight", (1,), (0,)),
        ("learn", (True,), (False,)),
        ("is_target", (True,), (False,)),
        ("masked", (False, 0, "false"), (True, 1, "yes")),
        ("ignore", (False,), (True,)),
        ("no_loss", (False,), (True,)),
        ("toxic", (False, True), ()),
        ("name", ("0", "no"), ()),
    ],
)
def test_marks_of_turns(name, learned, unlearned):
    """A turn that the data leave out of the loss is refused; one that they leave in is read."""
    for value in learned:
        assert read({"messages": [ASK, {**SAY, name: value}]}).messages[1]["content"] == "yes"
    for value in unlearned:
        with pytest.raises(DataError, match=f"message 1 has {name} .*, and all turns of the assistant are learned"):
            read({"messages": [ASK, {**SAY, name: value}]})


def test_turns_before_the_completion_need_not_be_learnable(tmp_path):
    """A prompt may begin with the assistant, and its reasoning may be left out later: neither is learned."""
    tokenizer = make_tokenizer(THINKING)
    said = {"role": "assistant", "content": "hm</think>yes"}
    talk = {"prompt": [said, ASK], "completion": [said]}
    encoder = TextEncoder.of(tokenizer)
    (sample,) = samples_of(tokenized(tmp_path, talk, encoder=encoder))
    assert tokenizer.decode([label for label in sample[1] if label != -100]) == "hm</think>yes<|im_end|>"
    with pytest.raises(DataError, match="line 1: the conversation begins with the assistant"):
        tokenized(tmp_path, {"messages": [said, ASK, said]}, encoder=encoder)
