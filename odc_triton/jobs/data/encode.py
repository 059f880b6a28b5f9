"""Records as token ids, with the spans that are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .chat import ChatError, Conversation, Spans, encode_heads, portions
from .records import DataError, Record, content_text
from .tokenizer import TextEncoder
from .vision import SeenImages, VisionProcessor

_BATCH_RECORDS = 1024  # most per call of the tokenizer


class Encoded(NamedTuple):
    """One record. `ids` of a too long one are more than the cap, and their end may be missing."""

    ids: list[int]
    spans: Spans  # that are learned
    images: SeenImages | None = None
    floor: int = 0  # tokens up to and including the last image's


def encode_records(batch: list[Record], encoder: TextEncoder, max_tokens: int) -> Iterator[Encoded]:
    """The batch's records, encoded. Raises DataError."""
    if encoder.images is not None:
        for record in batch:
            encoder.images.require_unspelled(record)
    texts = [
        text
        for each in batch
        if each.messages is None
        for text in (each.prompt, (each.prompt or "") * encoder.puts_space + each.completion)
    ]
    heads = encode_heads(encoder.encode_batch, [text for text in texts if text is not None], max_tokens)
    encoded = (ids for ids, _ in heads)
    chats = iter(_encode_chats([each for each in batch if each.messages is not None], encoder, max_tokens))
    for record in batch:
        if record.messages is not None:
            yield next(chats)
            continue
        if record.prompt is None:
            completion, masked = next(encoded), 0
            ids = encoder.begun(encoder.before_text, completion)
        else:
            head = [*encoder.begun(encoder.before_prompt, next(encoded)), *encoder.before_completion]
            completion = next(encoded)
            if encoder.puts_space:
                whole = encoder.begun(encoder.before_prompt, completion)
                masked = next((at for at, (a, b) in enumerate(zip(head, whole, strict=False)) if a != b), len(head))
                completion, head = whole[masked:], whole[:masked]
            ids, masked = [*head, *completion], len(head)
        # A text made by a chat template may already have its end token.
        if not len(completion) or completion[-1] != encoder.end_id:
            ids.append(encoder.end_id)
        yield Encoded(ids, [(masked, len(ids))])


def _encode_chats(records: list[Record], encoder: TextEncoder, max_tokens: int) -> list[Encoded]:
    if not records:
        return []
    if encoder.chat is None:
        raise DataError(
            f"{records[0].where}: messages need a chat template, and a bare tokenizer.json has none; give the "
            "folder of the model's tokenizer, or render the conversations to 'prompt' and 'completion'"
        )
    vision = encoder.images
    seen = [vision.see(each) if vision is not None and each.images else None for each in records]
    conversations = [
        Conversation(_contents(each.messages, vision), each.tools, each.learned_from, saw.texts if saw else ())
        for each, saw in zip(records, seen, strict=True)
    ]
    try:
        encoded = encoder.chat.encode(conversations, max_tokens)
    except ChatError as error:
        raise DataError(f"{records[error.index].where}: {error}") from error
    floors = [
        vision.floor(record.where, ids, saw.texts, max_tokens) if saw else 0
        for record, saw, (ids, _) in zip(records, seen, encoded, strict=True)
    ]
    return [Encoded(*each, saw, floor) for each, saw, floor in zip(encoded, seen, floors, strict=True)]


def _contents(messages: list[dict[str, Any]], vision: VisionProcessor | None) -> list[dict[str, Any]]:
    """The messages as templates want them: a processor's takes lists of parts, and may drop a plain text."""

    def content(message: dict[str, Any]) -> Any:
        given = message["content"]
        if vision is not None:
            return [{"type": "text", "text": given}] if isinstance(given, str) else given
        has_image = not isinstance(given, str) and any(part["type"] == "image" for part in given)
        return given if has_image else content_text(message)

    return [each | {"content": content(each)} if "content" in each else each for each in messages]


def never_ends(
    batch: Sequence[Record], encoded: Sequence[Encoded], encoder: TextEncoder, max_tokens: int
) -> str | None:
    """A warning if conversations are learned and none of their turns ends with the end token.

    `encoded`: `batch` as encoded by `encode_records`; samples longer than `max_tokens` may lack their end.
    """
    learned = [
        sample.ids[start:end]
        for record, sample in zip(batch, encoded, strict=True)
        for start, end in sample.spans
        if record.messages is not None and len(sample.ids) <= max_tokens
    ]
    if not learned or any(encoder.end_id in ids for ids in learned):
        return None
    end = encoder.end_id if encoder.decode is None else encoder.decode([encoder.end_id])
    return (
        f"the chat template ends no turn of the assistant with the tokenizer's end token, {end}: the trained model "
        f"will not stop there. Make the token that ends a turn the eos_token, or stop at it when you generate"
    )


def batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    return portions(records, lambda record: record.characters, _BATCH_RECORDS)
