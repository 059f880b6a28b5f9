"""Turns conversations into token ids with a tokenizer's chat template, and finds the assistant's tokens.

A template with {% generation %} marks names them. Otherwise the conversation is rendered twice for each of the
assistant's turns: up to the turn (with the header that asks for it), and up to its end. The text in between is learned,
including what the template writes after the turn. This is right only if the whole conversation begins with the tokens
of each of these prefixes, which is checked (of long conversations: `_edges`). A template that renders earlier turns
differently once later ones follow, for example without their reasoning, is refused. Turns before `learned_from` are not
learned, and not checked.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .vision import VisionProcessor

T = TypeVar("T")
Messages = Sequence[dict[str, Any]]
Spans = list[tuple[int, int]]  # [start, end) of the tokens that are learned, ascending, not adjacent
EncodeBatch = Callable[[list[str]], Sequence[Sequence[int]]]

ASSISTANT = "assistant"
# Text per call of the tokenizer.
_CHARACTERS = 4_000_000
# Above any text's, except white space or a letter repeated many times.
CHARACTERS_PER_TOKEN = 64
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Fields of a turn that are a part of what it says; others are notes: names, ids, dates, scores.
_SAID = re.compile(r"(reasoning|thinking|thought)(s|_content|_text|_blocks)?|cot|(function|tool)_calls?|refusal|audio")
_REMEDY = "give a template with {% generation %} marks, or write one record per turn of the assistant"


class Conversation(NamedTuple):
    messages: Messages
    tools: list[dict[str, Any]] | None = None  # JSON schemas of the functions that may be called
    learned_from: int = 0  # the first message that may be learned
    images: Sequence[str] = ()  # of each image, the text that stands for it


class ChatError(ValueError):
    """A conversation that cannot be rendered; `index` is its position in the list."""

    def __init__(self, index: int, reason: str) -> None:
        # A template may quote a message, and this text goes to terminals and logs.
        super().__init__(reason.encode("utf-8", "backslashreplace").decode())
        self.index = index


class ChatTemplate:
    """The chat template of a transformers tokenizer, or of a processor with this tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encode_batch: EncodeBatch,
        images: VisionProcessor | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """`encode_batch` encodes rendered texts and adds no special tokens. Of a processor: its `images`, and in
        `before` the token that begins a text if the template writes none.
        """
        self._tokenizer, self._encode_batch, self._before = tokenizer, encode_batch, [*before]
        self._template, self._mark = (images.template, images.mark) if images else (None, None)

    def encode(self, conversations: Sequence[Conversation], max_tokens: int) -> list[tuple[list[int], Spans]]:
        """(token ids, learned spans) of each conversation, in order; no end token is added.

        Turns that begin after `max_tokens` tokens may be left unmarked. Raises ChatError.
        """
        try:
            self._tokenizer.get_chat_template(self._template)
        except ValueError as error:
            raise ChatError(
                0,
                "messages need a tokenizer with a chat template, and this one has "
                "none; put the template of the model's instruction-tuned sibling into its folder "
                "(chat_template.jinja), give --chat-template, or render the conversations to 'prompt' and 'completion'",
            ) from error
        given = self._template or self._tokenizer.chat_template
        templates = given.values() if isinstance(given, dict) else [given]  # one of several may be for tools
        for index, conversation in enumerate(conversations if self._mark is None else []):
            if any(not isinstance(message.get("content", ""), str) for message in conversation.messages):
                raise ChatError(
                    index, "has images, which a tokenizer alone can't read: give the folder of a model that sees them"
                )
        if self._tokenizer.is_fast and all(_MARKS.search(each) for each in templates):
            return self._by_marks(conversations, max_tokens)
        return self._by_prefixes(conversations, max_tokens)

    def _by_marks(self, conversations: Sequence[Conversation], max_tokens: int) -> list[tuple[list[int], Spans]]:
        # Not apply_chat_template(return_assistant_tokens_mask=True): if marks end in a character of several tokens, it
        # drops all but the first; if they begin in white space that the tokenizer's offsets leave out, it drops this
        # turn and all later ones (transformers 5.23).
        from transformers.utils.chat_template_utils import render_jinja_template

        def rendered(messages: Messages, tools: list[dict[str, Any]] | None) -> tuple[str, list[tuple[int, int]]]:
            (text,), (ranges,) = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(self._template, tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
            return text, ranges

        texts, marks = [], []
        for index, conversation in enumerate(conversations):
            with _refused(index):
                text, ranges = rendered(conversation.messages, conversation.tools)
            text = self._complete(index, conversation, text)
            texts.append(self._with_images(index, conversation, text))
            before = conversation.messages[: conversation.learned_from]
            if any(message["role"] == ASSISTANT for message in before):
                with _refused(index):
                    ranges = ranges[len(rendered(before, conversation.tools)[1]) :]
            marks.append(self._moved(ranges, text, conversation.images))

        def encode(some: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
            out = self._tokenizer(some, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            found = zip(map(self._begin, some), out["input_ids"], out["offset_mapping"], strict=True)
            return [([*begin, *ids], [(0, 0) for _ in begin] + offsets) for begin, ids, offsets in found]

        heads = encode_heads(encode, texts, max_tokens, tokens=lambda each: len(each[0]))
        return [(ids, _covering(offsets, ranges)) for ((ids, offsets), _), ranges in zip(heads, marks, strict=True)]

    def _by_prefixes(self, conversations: Sequence[Conversation], max_tokens: int) -> list[tuple[list[int], Spans]]:
        wholes = [self._complete(index, each, self._render(index, each)) for index, each in enumerate(conversations)]
        texts = [self._with_images(index, each, wholes[index]) for index, each in enumerate(conversations)]
        heads = [each for some in portions(texts, len) for each in encode_heads(self._encode, some, max_tokens)]
        ids, read = [list(each) for each, _ in heads], [characters for _, characters in heads]
        edges: list[list[int]] = [[] for _ in conversations]  # tokens before and after each turn of the assistant
        added = {token: text for text, token in self._tokenizer.get_added_vocab().items()}

        def windows() -> Iterator[tuple[int, int, int, str]]:
            """Of each edge the conversation, the turn, and the text before the edge from a token of that number on."""
            for index, conversation in enumerate(conversations):
                places, tokens = self._starts(texts[index][: read[index]], ids[index], added)

                def is_cut(turn: int, own: list[int] = edges[index]) -> bool:
                    # A message takes at least one token. Edges arrive in portions, so this one may be late.
                    return turn >= max_tokens or bool(own and own[-1] >= max_tokens)

                for turn, end in self._edges(index, conversation, wholes[index], is_cut):
                    ((end, _),) = self._moved([(end, end)], wholes[index], conversation.images)
                    start = max(bisect_left(places, end) - 1, 0)
                    if end < read[index]:
                        yield index, turn, tokens[start], texts[index][places[start] : end]
                    else:
                        yield index, turn, len(ids[index]), ""

        for some in portions(windows(), lambda each: len(each[-1])):
            encoded = self._encode_batch([text for *_, text in some])
            for (index, turn, start, text), tail in zip(some, encoded, strict=True):
                tail = [*(() if start else self._begin(text)), *tail]
                if tail != ids[index][start : start + len(tail)]:
                    edge = "end" if len(edges[index]) % 2 else "begin"
                    raise ChatError(
                        index,
                        f"message {turn} of the assistant does not {edge} between two tokens of the whole "
                        f"conversation. White space there, of the message or the chat template, can cause this: strip "
                        f"it, or {_REMEDY}",
                    )
                edges[index].append(start + len(tail))
        return [
            (whole, joined_spans(zip(each[::2], each[1::2], strict=True)))
            for whole, each in zip(ids, edges, strict=True)
        ]

    @staticmethod
    def _starts(text: str, ids: list[int], added: dict[int, str]) -> tuple[list[int], list[int]]:
        """Characters and tokens before which `text` may be cut: its begin, and added tokens, as tokenizers encode apart
        what is between these.
        """
        tokens = [at for at, token in enumerate(ids) if token in added]
        own = sorted({added[ids[at]] for at in tokens}, key=len, reverse=True)
        found = [*re.finditer("|".join(map(re.escape, own)), text)] if own else []
        if [each[0] for each in found] != [added[ids[at]] for at in tokens]:
            return [0], [0]
        return [0, *(each.start() for each in found)], [0, *tokens]

    def _edges(
        self, index: int, conversation: Conversation, whole: str, is_cut: Callable[[int], bool]
    ) -> Iterator[tuple[int, int]]:
        """Each learned turn twice: with the characters of `whole` before it, its header included, and up to its end.

        Prefixes together grow with the square of the turns. So only those of turns 0, 1, 2, 4, … are rendered. Others
        are rendered after the first turn of the assistant alone: they end there if `whole` goes on in the same way, and
        so does what follows them.
        """
        messages, tools = conversation.messages, conversation.tools

        def ends(some: Messages, before: str = "", at: int = 0) -> list[int] | None:
            """Where the last of `some` begins and ends: their text after `before` has to be in `whole` at `at`."""
            found = []
            for part, asks in ((some[:-1], True), (some, False)):
                text = whole if part == messages else self._render(index, Conversation(part, tools), asks)
                if not text.startswith(before) or not whole.startswith(text[len(before) :], at):
                    return None
                found.append(at + len(text) - len(before))
            return found

        def full(turn: int) -> list[int]:
            found = ends(messages[: turn + 1])
            if found is None:
                raise ChatError(
                    index,
                    f"the chat template renders the assistant's message {turn}, or what precedes it, differently "
                    f"in the whole conversation; {_REMEDY}",
                )
            return found

        turns = [turn for turn, message in enumerate(messages) if message["role"] == ASSISTANT]
        lead, before = messages[: turns[0] + 1] if turns else [], ""  # up to the first turn's end, and its text
        last, found = -1, [0, 0]  # the turn before, which is right if what follows goes on at its end

        def goes_on(turn: int) -> list[int] | None:
            """`ends` of the messages from the last turn's end up to `turn`."""
            nonlocal before
            with suppress(ChatError):  # of a template that takes no such conversation
                before = before or self._render(index, Conversation(lead, tools))
                return ends([*lead, *messages[last + 1 : turn + 1]], before, found[1])
            return None

        for number, turn in enumerate(each for each in turns if each >= conversation.learned_from):
            if is_cut(turn):
                break
            if turn == 0:
                raise ChatError(
                    index, f"the conversation begins with the assistant; put a user message first, or {_REMEDY}"
                )
            next_found = goes_on(turn) if number else None
            if number:
                found = found if next_found else full(last)
                yield from ((last, each) for each in found)
            last, found = turn, next_found if next_found and number & (number - 1) else full(turn)
            before = whole[: found[1]] if turn == turns[0] else before
        else:
            is_last = last + 1 == len(messages)
            if last >= 0 and not (found[1] == len(whole) if is_last else goes_on(len(messages) - 1)):
                found = full(last)
        yield from ((last, each) for each in found if last >= 0)

    def _complete(self, index: int, conversation: Conversation, text: str) -> str:
        """Returns `text`, the rendered conversation. Raises ChatError if it lacks a part of it, or is no UTF-8."""
        messages, tools = conversation.messages, conversation.tools
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(index, "the chat template renders half a surrogate pair") from error

        def is_same(changed: Messages, tools: list[dict[str, Any]] | None) -> bool:
            try:
                return self._render(index, Conversation(changed, tools)) == text
            except ChatError:  # so the template reads the changed part
                return False

        left_out = "record's 'tools'" if tools and is_same(messages, None) else None
        # By role and name: of each message, is it in the text, and in the message's content, between tags?
        fields: dict[tuple[str, str], dict[int, tuple[bool, bool]]] = {}
        for turn, message in enumerate(messages):
            for name, value in message.items():
                is_turn = message["role"] == ASSISTANT and turn >= conversation.learned_from
                is_text = name == "content" and isinstance(value, str)
                if value and (is_text or name == "tool_calls" or (is_turn and _SAID.fullmatch(name))):
                    said = value.strip() if isinstance(value, str) else None
                    in_tags = said and re.search(rf">\s*{re.escape(said)}\s*<", str(message.get("content")))
                    seen = said is not None and said in text, bool(in_tags)
                    fields.setdefault((message["role"], name), {})[turn] = seen
        for (role, name), seen in fields.items():
            without = {turn for turn in seen if not seen[turn][0]}
            if not without and name != "content":  # other text may be the same by chance
                without = {turn for turn in seen if not seen[turn][1]}
            some = [
                {key: value for key, value in message.items() if key != name or turn not in without}
                for turn, message in enumerate(messages)
            ]
            if not left_out and without and is_same(some, tools):
                left_out = f"messages' {name!r} (role {role})"
        if left_out:
            raise ChatError(
                index,
                f"the chat template leaves out the {left_out}; give a template that writes it, leave it out of the "
                "data, or render the conversation to 'prompt' and 'completion'",
            )
        return text

    def _render(self, index: int, conversation: Conversation, asks: bool = False) -> str:
        with _refused(index):
            return self._tokenizer.apply_chat_template(
                list(conversation.messages),
                chat_template=self._template,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=asks,
            )

    def _encode(self, texts: list[str]) -> Sequence[Sequence[int]]:
        if not self._before:
            return self._encode_batch(texts)
        return [[*self._begin(text), *ids] for text, ids in zip(texts, self._encode_batch(texts), strict=True)]

    def _begin(self, text: str) -> list[int]:
        return [] if text.startswith(self._tokenizer.bos_token or "\0") else self._before

    def _with_images(self, index: int, conversation: Conversation, text: str) -> str:
        """A rendered text, with each image's own in place of its mark."""
        images = conversation.images
        if self._mark is None:
            return text
        parts = text.split(self._mark)
        if len(parts) - 1 != len(images):
            raise ChatError(
                index,
                f"the chat template writes {len(parts) - 1} {self._mark} for {len(images)} images: give the "
                "template of the model's processor",
            )
        return "".join(each for pair in zip(parts, [*images, ""], strict=True) for each in pair)

    def _moved(self, ranges: list[tuple[int, int]], text: str, images: Sequence[str]) -> list[tuple[int, int]]:
        """Ranges of characters of a rendered `text`, after `_with_images`."""
        if not images:
            return ranges
        ends = [found.end() for found in re.finditer(re.escape(self._mark), text)]
        gains = [0, *accumulate(len(each) - len(self._mark) for each in images)]
        return [tuple(at + gains[bisect_right(ends, at)] for at in each) for each in ranges]


def encode_heads(
    encode_batch: Callable[[list[str]], Sequence[T]],
    texts: Sequence[str],
    max_tokens: int,
    tokens: Callable[[T], int] = len,
) -> list[tuple[T, int]]:
    """For each text (the result of `encode_batch`, the number of characters encoded).

    If a text is far longer than `max_tokens` tokens, only a head of more than twice that is encoded, so memory does
    not grow with text that is cut off anyway. Twice, because the cut may change the tokens next to it.
    """
    most = max_tokens * CHARACTERS_PER_TOKEN
    heads = [text[:most] for text in texts]
    encoded = list(encode_batch(heads))
    for at, text in enumerate(texts):
        if len(text) > most and tokens(encoded[at]) <= 2 * max_tokens:
            heads[at], (encoded[at],) = text, encode_batch([text])
    return [(each, len(head)) for each, head in zip(encoded, heads, strict=True)]


def portions(values: Iterable[T], characters: Callable[[T], int], most: int = sys.maxsize) -> Iterator[list[T]]:
    """`values` in lists of at most `most`, and of about `_CHARACTERS` characters."""
    some, total = [], 0
    for value in values:
        some.append(value)
        total += characters(value)
        if len(some) == most or total > _CHARACTERS:
            yield some
            some, total = [], 0
    if some:
        yield some


@contextmanager
def _refused(index: int) -> Iterator[None]:
    try:
        yield
    except ChatError:
        raise
    except Exception as error:  # TemplateError, KeyError, TypeError, …: the template's code may raise anything
        why = f"{type(error).__name__}: {error}"
        raise ChatError(index, f"the chat template refuses this conversation ({why})") from error


def _covering(offsets: Sequence[tuple[int, int]], ranges: Iterable[tuple[int, int]]) -> Spans:
    """The tokens that have a character in one of `ranges`; `offsets` are each token's characters."""
    if not offsets:
        return []
    begins, ends = np.asarray(offsets).T
    # Byte-level tokenizers may leave a token's leading white space out of its offsets. The second token of one
    # character has the offsets of the first.
    ends = np.maximum.accumulate(ends)
    begins = np.minimum(begins, np.concatenate([[0], ends[:-1]]))
    return joined_spans(
        (int(np.searchsorted(ends, start, side="right")), int(np.searchsorted(begins, end, side="left")))
        for start, end in ranges
        if end > start
    )


def joined_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Ascending spans without empty ones, neighbours merged (two messages of the assistant in a row)."""
    joined: Spans = []
    for start, end in spans:
        if joined and joined[-1][1] >= start:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        elif end > start:
            joined.append((start, end))
    return joined
