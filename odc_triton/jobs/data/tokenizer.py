"""Text to token ids: one interface for transformers' tokenizers and small byte-level ones trained here.

A model's config is read here too, for its vocabulary.

Token ids of one sample, with `TextEncoder`'s parts in brackets:

    text                   [before_text] text [end_id]
    prompt + completion    [before_prompt] prompt [before_completion] completion [end_id]
    messages               rendered by the chat template (see `chat`)

Our tokenizer marks prompt and completion with special tokens; a model's own tokenizer has no such marks, and
its sequences begin with its beginning-of-sequence token, if it adds one. Prompt and completion are encoded
separately, so that no token crosses the boundary of what is learned. But a tokenizer that puts a space before each text
(SentencePiece) encodes them together, as TRL does: what is learned begins where the prompt's own tokens end or differ.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.errors import in_a_line
from ...base.files import reading
from ...checkpoint.adapted import with_tokenizer
from .chat import ChatTemplate
from .vision import VisionProcessor

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin

# Of tokenizers that a class may convert, in addition to the files that it names itself.
_VOCABULARIES = {"tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt"}
END = "<|end|>"
PAD = "<|pad|>"
PROMPT = "<|prompt|>"
COMPLETION = "<|completion|>"
SPECIAL_TOKENS = (END, PAD, PROMPT, COMPLETION)  # ids 0 to 3


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 8192) -> Tokenizer:
    """A byte-level BPE: every text has an encoding, and decoding gives it back.

    texts: to learn from.
    vocab_size: tokens, with the special tokens and the 256 bytes; fewer if the texts have too few pairs to merge.

    Raises ValueError for a vocabulary too small.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    smallest = 256 + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size is {vocab_size} tokens; bytes and special tokens alone need {smallest}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """Reads a `tokenizer.json`.

    path: of the file.

    Raises ValueError for a file that is not one, OSError if it can't be read.
    """
    from tokenizers import Tokenizer

    text = Path(path).read_bytes()
    try:
        return Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from error


def to_transformers(tokenizer: Tokenizer, name: str = "the tokenizer") -> PreTrainedTokenizerFast:
    """A tokenizer from `train_tokenizer` as transformers' class, with its end and pad tokens set.

    Raises ValueError with its `name` if it has no such end token.
    """
    from transformers import PreTrainedTokenizerFast

    if tokenizer.token_to_id(END) is None:
        raise ValueError(
            f"{name} has no {END} token, so odc-triton did not make it: give the folder of its model, where "
            f"tokenizer_config.json names the special tokens"
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[PROMPT, COMPLETION],
        clean_up_tokenization_spaces=False,
    )


def read_tokenizer(source: str | os.PathLike) -> PreTrainedTokenizerBase:
    """Transformers' tokenizer from a folder or hub id, or this project's own from a tokenizer.json.

    Raises OSError and ValueError for anything else.
    """
    from transformers import AutoTokenizer

    with reading(str(source)):
        if Path(source).suffix == ".json":
            return to_transformers(load_tokenizer(source), str(source))
        source = with_tokenizer(source)
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except OSError:
            raise
        except Exception as error:  # classes and files that are not as expected raise anything
            raise ValueError(
                f"{source} has no tokenizer that transformers can load: {in_a_line(error)}; give --tokenizer"
            ) from error
    require_tokens(tokenizer, source)
    return tokenizer


def require_tokens(tokenizer: PreTrainedTokenizerBase, source: str | os.PathLike) -> None:
    """Raises ValueError for a folder without the files of its tokenizer: transformers makes an empty one of it."""
    own = {*getattr(tokenizer, "vocab_files_names", {}).values()}  # none, for a tokenizer of bytes
    if own and Path(source).is_dir() and not any(Path(source, name).is_file() for name in own | _VOCABULARIES):
        raise ValueError(f"{source} has no tokenizer: give --tokenizer")


@dataclass(frozen=True, kw_only=True)
class TextEncoder:
    """An encoder of texts to token ids, and the special ids around them.

    `encode_batch` takes texts and returns their ids; it adds no special tokens. Special tokens written out
    in a text are recognised, as in transformers, so that texts made by a chat template work.
    """

    encode_batch: Callable[[list[str]], Sequence[Sequence[int]]]
    end_id: int
    before_text: tuple[int, ...] = ()
    before_prompt: tuple[int, ...] = ()
    before_completion: tuple[int, ...] = ()
    puts_space: bool = False  # before a text, so a completion is encoded with its prompt
    decode: Callable[[Sequence[int]], str] | None = None  # special tokens written out
    chat: ChatTemplate | None = None
    fingerprint: str | None = None  # changes whenever a text's ids might; None: unknown
    images: VisionProcessor | None = None  # None: records have none

    @classmethod
    def of(cls, tokenizer: Tokenizer | PreTrainedTokenizerBase | ProcessorMixin, *, fetch: bool = False) -> TextEncoder:
        """The encoder of any transformers tokenizer, of one that `train_tokenizer` made, or of a processor, with
        images; `fetch`: also those on the network.

        Raises ValueError if no end token is known, and for a processor that is not supported.
        """
        images = None
        if hasattr(tokenizer, "image_processor"):
            images, tokenizer = VisionProcessor(tokenizer, fetch=fetch), tokenizer.tokenizer
        if not hasattr(tokenizer, "eos_token_id"):
            tokenizer = to_transformers(tokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path} has no end-of-sequence token: set its eos_token, in "
                f"tokenizer_config.json in its folder, so that the model learns where a completion ends"
            )
        bos = tokenizer.bos_token_id
        begins = bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [bos]
        begin = (bos,) if begins else ()
        vocabulary = tokenizer.get_vocab()
        marks = [(vocabulary[token],) if token in vocabulary else () for token in (PROMPT, COMPLETION)]

        if images is not None and tokenizer("", verbose=False)["input_ids"] != [*begin]:
            raise ValueError(f"{tokenizer.name_or_path} adds a token to a text's end, which is not supported")

        encodes_plainly = _encodes_plainly(tokenizer)

        def encode_batch(texts: list[str]) -> Sequence[Sequence[int]]:
            if not texts:  # transformers refuses an empty list
                return []
            if not encodes_plainly:
                return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            tokenizer("", verbose=False)  # turns off padding and truncation that its file may set
            rust = tokenizer.backend_tokenizer
            return [encoding.ids for encoding in rust.encode_batch_fast(texts, add_special_tokens=False)]

        return cls(
            encode_batch=encode_batch,
            end_id=tokenizer.eos_token_id,
            before_text=begin,
            before_prompt=begin + marks[0],
            before_completion=marks[1],
            puts_space=not marks[1] and _puts_space(tokenizer),
            decode=lambda ids: tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            chat=ChatTemplate(tokenizer, encode_batch, images, begin if images else ()),
            fingerprint=_fingerprint(tokenizer) + (images.fingerprint() if images else ""),
            images=images,
        )

    def begun(self, before: tuple[int, ...], ids: Sequence[int]) -> list[int]:
        """`ids` after `before`; a text made by a chat template may have the begin token, and gets no other."""
        has_begun = tuple(ids[:1]) == self.before_text
        return [*before[len(self.before_text) if has_begun else 0 :], *ids]


def _encodes_plainly(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if transformers adds nothing to its Rust library; the library alone is faster."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        tokenizer.is_fast
        and not tokenizer.split_special_tokens
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    )


def _puts_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    first = tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"][:1])
    return bool(first) and first[0][0] in "▁Ġ"  # as SentencePiece and byte-level vocabularies write a space


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    import tokenizers
    import transformers

    # A slow tokenizer is Python code: its class, vocabulary and settings stand for it.
    rules = (
        tokenizer.backend_tokenizer.to_str()
        if tokenizer.is_fast
        else repr((type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items()), tokenizer.init_kwargs))
    )
    parts = (
        transformers.__version__,  # it renders the chat template
        tokenizers.__version__,
        getattr(tokenizer, "split_special_tokens", False),
        rules,
        tokenizer.chat_template,
        sorted(tokenizer.special_tokens_map.items()),
        (tokenizer.bos_token_id, tokenizer.eos_token_id),
    )
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()
