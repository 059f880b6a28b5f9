"""Conversations: what the assistant said is learned, whatever the template, or the record is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from odc_triton.jobs.data import chat, encode
from odc_triton.jobs.data.dataset import DataOptions
from odc_triton.jobs.data.encode import encode_records, never_ends
from odc_triton.jobs.data.records import DataError
from odc_triton.jobs.data.sources import open_source
from odc_triton.jobs.data.tokenizer import TextEncoder
from tests.support.chats import (
    CHATML,
    MARKED,
    MARKED_WORDS,
    SPACED,
    THINKING,
    WRITERS,
    Segments,
    chatml,
    make_tokenizer,
    said,
)
from tests.support.records import samples_of, tokenized, write_lines
from tests.support.tokenized import tokenize_file

processors = pytest.importorskip("tokenizers").processors


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make_tokenizer(template) for name, (template, _) in WRITERS.items()}


def expected(tokenizer, segments: Segments) -> tuple[list[int], list[int], bool]:
    """(ids, labels, whether some token lies across a boundary of what is learned), from the text alone."""
    text = "".join(part for part, _ in segments)
    encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    learned = np.concatenate([np.full(len(part), flag) for part, flag in segments])
    labels, across = [], False
    for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
        flags = learned[begin:end]
        across |= bool(flags.any() and not flags.all())
        labels.append(token if flags.any() else -100)
    return encoding.ids, labels, across


@pytest.mark.parametrize("name", WRITERS)
def test_samples_by_template(tokenizers, tmp_path, name):
    tokenizer, write = tokenizers[name], WRITERS[name][1]
    conversations = [
        said("hello", "yes"),
        [{"role": "system", "content": "be kind"}, *said("hello é", "yes, 😀", "and?", " no ", "x")],
        said("", ""),
        [*said("two", "in a"), {"role": "assistant", "content": "row"}],
    ]
    data = tokenized(tmp_path, *({"messages": each} for each in conversations), encoder=TextEncoder.of(tokenizer))
    wanted = [expected(tokenizer, write(each)) for each in conversations]
    if name == "marked words":  # an empty answer leaves nothing to learn
        del wanted[2]
    assert not any(across for *_, across in wanted)
    assert samples_of(data) == [(ids, labels) for ids, labels, _ in wanted]
    assert data.summary.dropped_no_target == (name == "marked words")
    # No end token is added: the template says how a conversation ends.
    assert samples_of(data)[0][0] == tokenizer.apply_chat_template(conversations[0])["input_ids"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_template_that_never_writes_the_end_token(tmp_path, ends):
    """Its models would not stop."""
    encoder = TextEncoder.of(make_tokenizer(CHATML.replace("<|im_end|>", "<|end|>") if ends else CHATML))
    path = write_lines(tmp_path / "data.jsonl", {"text": "a"}, {"messages": said("a", "b", "c", "d")})
    records = list(open_source(str(path)))

    def told(some, cap=64):
        return never_ends(some, list(encode_records(some, encoder, cap)), encoder, cap)

    if ends:
        assert told(records) is None
    else:
        assert "no turn of the assistant with the tokenizer's end token, <|end|>" in told(records)
    assert told(records[:1]) is None, "a text is not a conversation"
    assert told(records, cap=2) is None, "an end that is cut off is not missed"


def test_offsets_without_white_space(tmp_path):
    """Some tokenizers report a token's characters without its leading white space, where marks may begin and end."""
    tokenizer = make_tokenizer(MARKED_WORDS)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    words = [" yes", "no \n", "é 😀 ", "😀"]
    path = write_lines(tmp_path / "data.jsonl", *({"messages": said("why", each, "and", "x")} for each in words))
    for each, (_, labels) in zip(words, samples_of(tokenize_file(path, TextEncoder.of(tokenizer))), strict=True):
        learned = np.array(labels) != -100
        first = learned.copy()
        first[learned.argmax() + int(np.argmin(learned[learned.argmax() :])) :] = False
        assert tokenizer.decode(np.array(labels)[first]) == each
        assert tokenizer.decode(np.array(labels)[learned & ~first]) == "x"


CONTENTS = st.text(st.sampled_from("ab \n\0é😀\u2028"), max_size=6) | st.sampled_from(
    ["<|im_end|>", "yes\n\n\n", "<|end|>"]
)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": CONTENTS}),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(name=st.sampled_from(list(WRITERS)), messages=CONVERSATIONS, max_tokens=st.integers(2, 60))
@example(name="chatml", messages=said("a", "\n\nb"), max_tokens=60)
@example(name="llama", messages=said("a", "b"), max_tokens=60)
@example(name="marked words", messages=said("a", "é"), max_tokens=60)
@example(name="marked words", messages=said("a", "😀", "b"), max_tokens=60)
def test_samples_against_the_text(tokenizers, tmp_path_factory, name, messages, max_tokens):
    path = write_lines(tmp_path_factory.getbasetemp() / "chat.jsonl", {"messages": messages})
    tokenizer = tokenizers[name]
    ids, labels, _ = expected(tokenizer, WRITERS[name][1](messages))
    cut_ids, cut_labels = ids[:max_tokens], labels[:max_tokens]
    try:
        data = tokenize_file(path, TextEncoder.of(tokenizer), DataOptions(max_tokens=max_tokens))
    except DataError as error:
        reason = str(error)
    else:
        assert samples_of(data) == [(cut_ids, cut_labels)]
        return
    assert "chat.jsonl" in reason
    if "begins with the assistant" in reason:
        assert messages[0]["role"] == "assistant"
    elif "between two tokens" in reason:
        # A prefix may have other tokens than the whole without one across, but only by white space.
        assert any(part[:1].isspace() for part, learned in WRITERS[name][1](messages) if learned)
    else:
        assert "leaves no sample" in reason
        assert all(label == -100 for label in cut_labels[1:])


def test_forms_may_be_mixed_and_long_files_come_in_batches(tokenizers, tmp_path, monkeypatch):
    tokenizer = tokenizers["chatml"]
    records = [
        {"messages": said("hello", "yes")},
        {"text": "hello"},
        {"prompt": "again", "completion": "no"},
        {"messages": said("again", "no", "and", "yes"), "prompt": "again"},
    ] * 3
    data = tokenized(tmp_path, *records, encoder=TextEncoder.of(tokenizer))
    for batch_records in (1, 5):
        monkeypatch.setattr(encode, "_BATCH_RECORDS", batch_records)
        assert samples_of(tokenized(tmp_path, *records, encoder=TextEncoder.of(tokenizer))) == samples_of(data)
    ids, labels, _ = expected(tokenizer, WRITERS["chatml"][1](records[3]["messages"]))
    assert samples_of(data)[3] == (ids, labels)
    assert data.summary.samples == 12


SPACE_AFTER = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, said("a", "b"), "need a tokenizer with a chat template, and this .* has none; put the template"),
        (CHATML, said("a", "\n\nb"), "message 1 of the assistant does not begin between two tokens .*strip it"),
        (SPACED, said("a", "yes"), "message 1 of the assistant does not begin between two tokens .*the chat template"),
        (SPACE_AFTER, said("a", "yes", "b"), "message 1 of the assistant does not end between two tokens"),
        (SPACE_AFTER.replace("}} {%", "}}{%"), said("a", "yes ", "b"), "does not end between two tokens .*strip it"),
        (CHATML, said("a", "b")[1:], "begins with the assistant; put a user message first"),
        (THINKING, said("a", "<think>1</think>b", "c", "d"), "the assistant's message 1.*differently in the whole"),
        ("{{ raise_exception('roles must alternate') }}", said("a", "b"), "refuses this conversation .*roles must alt"),
        (MARKED + "{{ 1 // 0 }}", said("a", "b"), r"refuses this conversation \(ZeroDivisionError"),
    ],
)
def test_unusable_conversation_is_named(tmp_path, template, messages, message):
    tokenizer = make_tokenizer(template)
    records = [{"text": "fine"}, {"messages": messages}]
    with pytest.raises(DataError, match=f"(?s)data.jsonl, line 2: .*{message}"):
        tokenized(tmp_path, *records, encoder=TextEncoder.of(tokenizer))


def test_the_right_line_of_a_batch_is_named(tmp_path):
    path = write_lines(tmp_path / "data.jsonl", *[{"messages": said("a", "b")}] * 3, {"messages": said("a", "oops")})
    refuses = "{% if messages[-1].content == 'oops' %}{{ raise_exception('no') }}{% endif %}"
    for template in (CHATML + refuses, MARKED + refuses):
        with pytest.raises(DataError, match=r"line 4: .*no"):
            tokenize_file(path, TextEncoder.of(make_tokenizer(template)))


def test_long_conversations_come_in_portions(tokenizers, tmp_path, monkeypatch):
    conversations = [said(*["why", "yes and no"] * turns) for turns in (1, 40, 7, 1)]
    path = write_lines(tmp_path / "data.jsonl", *({"messages": each} for each in conversations))
    wanted = [expected(tokenizers["chatml"], chatml(each))[:2] for each in conversations]
    encoder = TextEncoder.of(tokenizers["chatml"])
    for characters in (1, 900, 10**9):
        monkeypatch.setattr(chat, "_CHARACTERS", characters)
        assert samples_of(tokenize_file(path, encoder)) == wanted
        cut = tokenize_file(path, encoder, DataOptions(max_tokens=70))
        assert samples_of(cut) == [(ids[:70], labels[:70]) for ids, labels in wanted]


def test_what_follows_a_turn_by_its_number_is_learned_with_it(tmp_path):
    """As by the prefixes of all turns: the next turn shows that the text goes on after the last."""
    suffixed = CHATML.replace("{% endfor %}", "{% if loop.index % 6 == 0 %}--{{ loop.index }}--{% endif %}{% endfor %}")
    tokenizer = make_tokenizer(suffixed)
    for turns, ends_with_user in ((12, False), (13, False), (13, True)):
        talk = said(*["why", "yes"] * turns)[: 2 * turns - ends_with_user]
        segments = []
        for number, each in enumerate(talk, start=1):
            tail = f"--{number}--" * (number % 6 == 0)
            is_learned = each["role"] == "assistant"
            segments += [(f"<|im_start|>{each['role']}\n", False), (f"{each['content']}<|im_end|>\n{tail}", is_learned)]
        wanted = [expected(tokenizer, segments)[:2]]
        assert samples_of(tokenized(tmp_path, {"messages": talk}, encoder=TextEncoder.of(tokenizer))) == wanted


def test_an_empty_message_before_the_first_turn(tmp_path):
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    )
    talk = said("", "a document of text", "", "and another")
    wanted = [expected(tokenizer, [("a document of text<|im_end|>and another<|im_end|>", True)])[:2]]
    assert samples_of(tokenized(tmp_path, {"messages": talk}, encoder=TextEncoder.of(tokenizer))) == wanted


# Writes the turn's number, so that no turn is the same at the end of a shorter conversation.
NUMBERED = CHATML.replace("<|im_start|>{{ m['role'] }}", "<|im_start|>{{ m['role'] }}{{ loop.index }}")
NUMBERED = NUMBERED.replace("assistant{{", "assistant{{ messages | length + 1 }}{{")


@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_work_grows_with_the_turns_and_not_with_their_square(tmp_path, name):
    template, write = WRITERS[name]
    work = []
    for turns in (40, 160):
        rendered, encoded = [], []
        tokenizer, plain = make_tokenizer(template), make_tokenizer(template)

        def render(messages, plain=plain, rendered=rendered, **options):
            rendered.append(plain.apply_chat_template(messages, **options))
            return rendered[-1]

        tokenizer.apply_chat_template = render
        encoder = TextEncoder.of(tokenizer)
        encode_batch = encoder.chat._encode_batch
        encoder.chat._encode_batch = lambda texts, to=encoded, by=encode_batch: to.extend(texts) or by(texts)
        # One question and one answer are long: what is rendered with each turn must not have them.
        talk = said(*["why", "yes and no"] * (turns // 2), "hello", "yes " * 400, *["why", "yes and no"] * (turns // 2))
        data = tokenized(tmp_path, {"messages": talk}, encoder=encoder, max_tokens=10**6)
        assert samples_of(data) == [expected(tokenizer, write(talk))[:2]]
        work.append((sum(map(len, rendered)), sum(map(len, encoded))))
    (few_rendered, few_encoded), (many_rendered, many_encoded) = work
    assert many_rendered < 5 * few_rendered
    assert many_encoded < 5 * few_encoded


@pytest.mark.parametrize("turn", [1, 13, 23])
def test_a_template_that_rewrites_one_turn_of_many_is_refused(tmp_path, turn):
    contents = ["why", "yes"] * 13
    contents[turn] = "<think>1</think>yes"
    with pytest.raises(DataError, match=f"assistant's message {turn}, or what precedes it, differently in the whole"):
        tokenized(tmp_path, {"messages": said(*contents)}, encoder=TextEncoder.of(make_tokenizer(THINKING)))
    contents[turn], contents[-1] = "yes", "<think>1</think>yes"  # the last is not written again
    tokenized(tmp_path, {"messages": said(*contents)}, encoder=TextEncoder.of(make_tokenizer(THINKING)))


def test_turns_that_no_shorter_conversation_has(tmp_path):
    tokenizer = make_tokenizer(NUMBERED)
    talk = said(*["why", "yes and no"] * 20)
    numbered = [{**each, "role": f"{each['role']}{at}"} for at, each in enumerate(talk, 1)]
    segments = chatml(numbered)
    wanted = [(text, text == "yes and no<|im_end|>\n") for text, _ in segments]
    data = tokenized(tmp_path, {"messages": talk}, encoder=TextEncoder.of(tokenizer))
    assert samples_of(data) == [expected(tokenizer, wanted)[:2]]


@pytest.mark.parametrize("learned_from", [0, 1, 3, 5, 7, 21])
def test_odd_orders_of_turns(tokenizers, tmp_path, learned_from):
    """Tools' answers, several turns of the assistant in a row, more than one system message; of a prompt and its
    completion the completion's turns are learned.
    """
    roles = ["system", "user", "assistant", "tool", "assistant", "assistant", "user", "user", "system", "assistant"] * 4
    talk = [{"role": role, "content": f"{role} says {at}"} for at, role in enumerate(roles)]
    halves = {"prompt": talk[:learned_from], "completion": talk[learned_from:]}
    for name, (_, write) in WRITERS.items():
        known = len(write(talk[:learned_from]))
        segments = [(text, learned and at >= known) for at, (text, learned) in enumerate(write(talk))]
        data = tokenized(
            tmp_path, halves if learned_from else {"messages": talk}, encoder=TextEncoder.of(tokenizers[name])
        )
        assert samples_of(data) == [expected(tokenizers[name], segments)[:2]]


def test_other_fields_reach_the_template(tmp_path):
    template = CHATML.replace("{{ m['content'] }}", "{{ m.get('name', '') }}{{ m['content'] }}")
    messages = [
        {"role": "user", "content": "hello", "name": "yes"},
        {"role": "assistant", "content": "no", "name": None},
    ]
    path = write_lines(tmp_path / "data.jsonl", {"messages": messages})
    tokenizer = make_tokenizer(template)
    ((ids, _),) = samples_of(tokenize_file(path, TextEncoder.of(tokenizer)))
    assert tokenizer.decode(ids).startswith("<|im_start|>user\nyeshello<|im_end|>\n<|im_start|>assistant\nno")


KEYS = st.sampled_from(["text", "prompt", "completion", "messages", "role", "content", "tools", "x", "\udfff"])
WORDS = st.sampled_from(["user", "assistant", "\0", "\ud800", "1e999", "<|im_end|>"]) | st.text(max_size=3)
NUMBERS = st.integers(-(10**60), 10**60) | st.floats()
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": WORDS | JSON_VALUES, "content": WORDS | JSON_VALUES}, optional={"x": JSON_VALUES}),
    max_size=4,
)
LINES = st.lists(
    st.dictionaries(KEYS, JSON_VALUES, max_size=3).map(json.dumps)
    | st.fixed_dictionaries({"messages": MESSAGES}).map(json.dumps)
    | st.integers(1, 3000).map(
        lambda depth: '{"messages": [{"role": "user", "content": "a", "x": ' + "[" * depth + "]" * depth + "}]}"
    ),
    min_size=1,
    max_size=3,
).map(lambda lines: "\n".join(lines).encode())


@settings(max_examples=150)
@given(name=st.sampled_from(["chatml", "marked"]), content=LINES | st.binary(max_size=60))
def test_no_input_raises_anything_but_data_error(tokenizers, tmp_path_factory, name, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(content)
    try:
        data = tokenize_file(path, TextEncoder.of(tokenizers[name]))
    except DataError as error:
        str(error).encode()  # a message that can't be written would be a traceback later
        assert "fuzz.jsonl" in str(error)  # noqa: PT017 - whether it raises depends on the input
    else:
        assert data.summary.samples == len(data) > 0
