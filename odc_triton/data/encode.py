"""Records as token ids, with the spans that are learned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .chat import ChatError, Conversation, Spans, encode_heads
from .records import DataError, Record
from .tokenizer import TextEncoder

_BATCH_CHARACTERS = 4_000_000  # of text per call of the tokenizer


def encode_records(batch: list[Record], encoder: TextEncoder, max_tokens: int) -> Iterator[tuple[list[int], Spans]]:
    """(token ids, learned spans) of each record; too long ones have more than `max_tokens` ids, and their end may be
    missing. Raises DataError.
    """
    texts = [text for each in batch if each.messages is None for text in (each.prompt, each.completion)]
    heads = encode_heads(encoder.encode_batch, [text for text in texts if text is not None], max_tokens)
    encoded = (ids for ids, _ in heads)
    chats = iter(_encode_chats([each for each in batch if each.messages is not None], encoder, max_tokens))
    for record in batch:
        if record.messages is not None:
            yield next(chats)
            continue
        if record.prompt is None:
            head, masked = [*encoder.before_text], 0
        else:
            head = [*encoder.before_prompt, *next(encoded), *encoder.before_completion]
            masked = len(head)
        completion = next(encoded)
        ids = [*head, *completion]
        # A text made by a chat template may already have its end token.
        if not len(completion) or completion[-1] != encoder.end_id:
            ids.append(encoder.end_id)
        yield ids, [(masked, len(ids))]


def _encode_chats(records: list[Record], encoder: TextEncoder, max_tokens: int) -> list[tuple[list[int], Spans]]:
    if not records:
        return []
    if encoder.chat is None:
        raise DataError(
            f"{records[0].where}: messages need a chat template, and a bare tokenizer.json has none; give the "
            "folder of the model's tokenizer, or render the conversations to 'prompt' and 'completion'"
        )
    try:
        return encoder.chat.encode(
            [Conversation(each.messages, each.tools, each.learned_from) for each in records], max_tokens
        )
    except ChatError as error:
        raise DataError(f"{records[error.index].where}: {error}") from error


def batches(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    """Batches of `most` records, or fewer if they are long."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += record.characters
        if len(batch) == most or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
