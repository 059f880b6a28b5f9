"""Conversations with tools: what the assistant says and calls is learned, and nothing is left out unsaid."""

from __future__ import annotations

import json

import pytest

from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import RecordFiles
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.data.test_chat import expected
from tests.support.chats import CHATML, MARKED, Segments, make_tokenizer
from tests.support.records import samples_of, tokenized, write_lines

# As Qwen 2.5 writes them: tools in a message of the system, answers of tools in one of the user, neighbours together.
QWEN = (
    "{% if tools %}<|im_start|>system{% for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>"
    "{{ '\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}{{ '\n' }}<a>{{ m.content }}</a>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>{{ '\n' }}{% endif %}"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant{{ '\n' }}GENERATION{% if m.content %}{{ m.content }}"
    "{% if m.tool_calls %}{{ '\n' }}{% endif %}{% endif %}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>{{ '\n' }}ENDGENERATION"
    "{% else %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
TEMPLATES = {
    "by prefixes": QWEN.replace("ENDGENERATION", "").replace("GENERATION", ""),
    "by marks": QWEN.replace("ENDGENERATION", "{% endgeneration %}").replace("GENERATION", "{% generation %}"),
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}


def call(name: str, **arguments: object) -> dict:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


MESSAGES = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": None, "tool_calls": [call("add", a=1, b=None), call("add", a=2)]},
    {"role": "tool", "content": "yes"},
    {"role": "tool", "content": "no é"},
    {"role": "assistant", "content": "and again", "tool_calls": [call("add", a=3)]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "the user asks"},
]


def qwen(messages: list[dict], tools: list[dict]) -> Segments:
    segments = [
        ("<|im_start|>system" + "".join(f"\n{json.dumps(each)}" for each in tools) + "<|im_end|>\n", False)
    ] * bool(tools)
    for at, message in enumerate(messages):
        if message["role"] == "tool":
            opens, closes = messages[at - 1]["role"] != "tool", messages[at + 1]["role"] != "tool"
            answer = f"\n<a>{message['content']}</a>"
            segments.append((opens * "<|im_start|>user" + answer + closes * "<|im_end|>\n", False))
            continue
        segments.append((f"<|im_start|>{message['role']}\n", False))
        calls = [f"<call>{json.dumps(each['function'])}</call>" for each in message.get("tool_calls", [])]
        said = [message["content"]] if message.get("content") else []
        text = "\n".join(said + ["".join(calls)] * bool(calls))
        segments.append((f"{text}<|im_end|>\n", message["role"] == "assistant"))
    return segments


@pytest.mark.parametrize("way", TEMPLATES)
def test_calls_and_tools_are_rendered_and_calls_are_learned(tmp_path, way):
    tokenizer = make_tokenizer(TEMPLATES[way])
    without_content = [{name: each[name] for name in each if each[name] is not None} for each in MESSAGES]
    records = [
        {"messages": MESSAGES, "tools": [TOOL, TOOL]},
        {"messages": MESSAGES, "tools": []},
        {"messages": without_content, "tools": None},
        {"messages": [MESSAGES[0], MESSAGES[-1]], "tools": [TOOL]},
    ]
    data = tokenized(tmp_path, *records, encoder=TextEncoder.of(tokenizer))
    wanted = [expected(tokenizer, qwen(each["messages"], each["tools"] or [])) for each in records]
    assert not any(across for *_, across in wanted)
    assert samples_of(data) == [(ids, labels) for ids, labels, _ in wanted]
    learned = tokenizer.decode([label for label in samples_of(data)[0][1] if label != -100])
    assert learned.startswith('<call>{"name": "add", "arguments": {"a": 1, "b": null}}</call><call>')
    assert "é" not in learned
    assert "parameters" not in learned


def test_a_template_of_its_own_for_tools(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    tokenizer.chat_template = {"default": CHATML, "tool_use": TEMPLATES["by marks"]}
    talk = [MESSAGES[0], MESSAGES[-1]]
    records = [{"messages": talk, "tools": [TOOL]}, {"messages": talk}]
    wanted = [expected(tokenizer, qwen(talk, tools))[:2] for tools in ([TOOL], [])]
    assert samples_of(tokenized(tmp_path, *records, encoder=TextEncoder.of(tokenizer))) == wanted


QUESTION, ANSWER = MESSAGES[0], MESSAGES[-1]
REASONED = {**ANSWER, "reasoning": "1"}
# Writes the reasoning of the last message alone, and no message of another role.
LAST_REASONED = MARKED.replace("{% generation %}", "{% generation %}{% if loop.last %}{{ m['reasoning'] }}{% endif %}")
NO_TOOLS = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")


@pytest.mark.parametrize(
    ("template", "record", "name"),
    [
        *((each, {"messages": [QUESTION, ANSWER], "tools": [TOOL]}, "record's 'tools'") for each in (CHATML, MARKED)),
        *((each, {"messages": MESSAGES}, "messages' 'tool_calls'") for each in (CHATML, MARKED)),
        *(
            (each, {"messages": [QUESTION, {**ANSWER, **field}]}, f"messages' {next(iter(field))!r}")
            for each in (CHATML, MARKED)
            for field in (
                {"function_call": {"name": "add", "arguments": "{}"}},
                {"reasoning_content": "asks"},
                {"thought_blocks": [{"text": "hm"}]},
                {"audio": {"id": "7", "transcript": "and again"}},
            )
        ),
        (
            LAST_REASONED,
            {"messages": [QUESTION, {**REASONED, "reasoning": "2"}, QUESTION, REASONED]},
            "messages' 'reasoning'",
        ),
        (LAST_REASONED, {"prompt": [QUESTION], "completion": [REASONED, QUESTION, ANSWER]}, "messages' 'reasoning'"),
        (NO_TOOLS, {"messages": [QUESTION, {"role": "function", "content": "3 é"}, ANSWER]}, "messages' 'content'"),
    ],
)
def test_what_a_template_leaves_out_is_named(tmp_path, template, record, name):
    with pytest.raises(
        DataError,
        match=rf"data.jsonl, line 2: the chat template leaves out the {name}( \(role \w+\))?; give a template",
    ):
        tokenized(tmp_path, {"text": "fine"}, record, encoder=TextEncoder.of(make_tokenizer(template)))


NOTED = {**ANSWER, "id": "m1", "model": "x-1", "score": 0.5, "created": "2026-01-01 10:00"}


@pytest.mark.parametrize(
    ("template", "record"),
    [
        (CHATML, {"messages": [QUESTION, NOTED]}),
        (CHATML, {"messages": [{**QUESTION, "note": "of a user"}, {**ANSWER, "name": "The Model", "tags": ["a"]}]}),
        (LAST_REASONED, {"messages": [QUESTION, REASONED]}),
        (LAST_REASONED, {"prompt": [QUESTION, REASONED, QUESTION], "completion": [ANSWER]}),  # it is not learned
    ],
)
def test_notes_and_earlier_reasoning_may_be_left_out(tmp_path, template, record):
    (sample,) = samples_of(tokenized(tmp_path, record, encoder=TextEncoder.of(make_tokenizer(template))))
    learned = make_tokenizer(template).decode([label for label in sample[1] if label != -100])
    assert learned.rstrip() == ("1" if REASONED in record.get("messages", []) else "") + "the user asks<|im_end|>"


def test_arguments_may_be_a_string_of_json(tmp_path):
    """As OpenAI's format has them; a template would quote them twice."""
    written = [json.dumps({"b": [1, "é"]}), {"b": [1, "é"]}, "no JSON", "[1]"]
    calls = [{"type": "function", "function": {"name": "add", "arguments": each}} for each in written]
    message = {"role": "assistant", "tool_calls": calls}
    path = write_lines(tmp_path / "data.jsonl", {"messages": [{"role": "user", "content": "a"}, message]})
    (record,) = RecordFiles([path])
    read = [each["function"]["arguments"] for each in record.messages[1]["tool_calls"]]
    assert read == [{"b": [1, "é"]}, {"b": [1, "é"]}, "no JSON", "[1]"]
