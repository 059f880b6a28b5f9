"""A model's processor: its tokenizer, and its image processor, of transformers.

Images are processed by Pillow and numpy: transformers' default image processors need torchvision. So do its video
processors, which a processor of a family with videos can't be made without: here it has None instead.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...base.environment import needs_transformers
from ...base.files import reading
from ...checkpoint.adapted import with_tokenizer
from ...plan.fields import IMAGE_FIELDS, TOKEN_TYPES, values_of
from .image_files import ImageError, decode_image, read_image
from .records import DataError, Record

_UNUSED = {"input_ids", "attention_mask", *TOKEN_TYPES, "text_replacement_offsets"}
_UNUSED |= {"num_crops", "rows", "cols"}  # of images, for their texts
# One of them is in the folder of every processor.
_FILES = ("processor_config.json", "preprocessor_config.json")


def has_processor(source: str | os.PathLike) -> bool:
    """True for a folder with a processor's files."""
    source = with_tokenizer(source)
    return any(Path(source, name).is_file() for name in _FILES)


def read_processor(source: str | os.PathLike) -> Any:
    """Transformers' processor from a folder or hub id, for texts and images. Raises OSError and ValueError."""
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(f'{source} has images, and they need Pillow: pip install "odc-triton[vision]"')
    from transformers import AutoProcessor

    source = with_tokenizer(source)

    with reading(str(source)), with_pillow():
        try:
            processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise ValueError(f"{source} has no processor that transformers can load: {error}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"{source} has no image processor, only a {type(processor).__name__}: give the folder of a model that sees "
            f"images, with its {' or '.join(_FILES)}"
        )
    return processor


@contextmanager
def with_pillow() -> Iterator[None]:
    """Inside, processors are made with Pillow's image processors, and without video processors."""
    from transformers import processing_utils
    from transformers.processing_utils import ProcessorMixin

    names = type(processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING)
    before, check = names._MAPPING_NAMES, ProcessorMixin.check_argument_for_proper_class
    ours = {"image_processor": (__name__, "_PillowImages"), "video_processor": (__name__, "_NoVideos")}
    names._MAPPING_NAMES = before | ours
    ProcessorMixin.check_argument_for_proper_class = lambda self, name, argument: (
        None if name == "video_processor" else check(self, name, argument)
    )
    try:
        yield
    finally:
        names._MAPPING_NAMES, ProcessorMixin.check_argument_for_proper_class = before, check


class _PillowImages:
    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(*args, **kwargs, backend="pil")


class _NoVideos:
    @staticmethod
    def from_pretrained(*args: Any, **kwargs: Any) -> None:
        return None


class SeenImages(NamedTuple):
    """The images of one record."""

    contents: list[bytes]  # as they are encoded
    texts: list[str]  # of each, what stands for it in the text, in place of the template's `VisionProcessor.mark`
    values: list[int]  # entries of pixel_values, by unit of attention in the tower


class VisionProcessor:
    """A processor of transformers, for the images of records and samples.

    `mark` is what its chat `template` writes for an image, `token_ids` what the model replaces by what it sees.
    """

    def __init__(self, processor: Any, *, fetch: bool = False) -> None:
        """`fetch`: images may be on the network. Raises ValueError for a processor that is not supported."""
        self.processor, self.fetch = processor, fetch
        if getattr(processor, "image_token", None) is None or not hasattr(processor, "get_text_with_replacements"):
            needs = needs_transformers("5.23") or "has no text that stands for an image"
            raise ValueError(f"{type(processor).__name__} {needs}")
        template = processor.chat_template
        self.template = template.get("default") if isinstance(template, dict) else template  # None: the tokenizer's
        self.mark = processor.image_token
        self.token_ids = [*processor.image_token_ids]
        self._token = processor.tokenizer.convert_ids_to_tokens(self.token_ids[0])
        self._reserved = {*processor.all_special_multimodal_tokens, self._token}

    def fingerprint(self) -> str:
        """Changes whenever an image's fields might."""
        import PIL

        parts = (self.processor.to_json_string(), self.processor.chat_template, PIL.__version__, np.__version__)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def see(self, record: Record) -> SeenImages:
        """Reads the images of a record. Raises DataError, which names the record and the image."""
        seen = SeenImages([], [], [])
        for number, source in enumerate(record.images, start=1):
            try:
                content = read_image(source, record.folder, fetch=self.fetch)
                fields, text = self._process([decode_image(content)])
            except ImageError as error:
                name = "" if isinstance(source, bytes) else f" ({source[:100]}{'…' * (len(source) > 100)})"
                raise DataError(f"{record.where}, image {number}{name}: {error}") from error
            seen.contents.append(content)
            seen.texts.extend(text)
            seen.values.extend(values_of(fields))
        return seen

    def fields(self, contents: Sequence[bytes]) -> dict[str, np.ndarray]:
        """What the processor makes of the images of one text, without the dimension of the batch."""
        return self._process([decode_image(each) for each in contents])[0]

    def types(self, ids: Any) -> np.ndarray:
        """[tokens] int64: 1 for the tokens that the model replaces by what it sees, else 0."""
        return np.isin(ids, self.token_ids).astype(np.int64)

    def floor(self, where: str, ids: Sequence[int], texts: Sequence[str], max_tokens: int) -> int:
        """Tokens of a sample up to and including its last image's; more than `max_tokens` if ids end before it.

        Raises DataError if they are not the tokens of `texts`.
        """
        places, wanted = np.flatnonzero(self.types(ids)), sum(text.count(self._token) for text in texts)
        if len(places) < wanted and len(ids) > max_tokens:
            return len(ids)
        if len(places) != wanted:
            raise DataError(f"{where}: the tokenizer makes {len(places)} tokens of {wanted} {self._token}")
        return int(places[-1]) + 1 if wanted else 0

    def require_unspelled(self, record: Record) -> None:
        """Raises DataError for a text that the model would take for an image."""
        text = json.dumps([record.prompt, record.completion, record.messages, record.tools], ensure_ascii=False)
        for token in sorted(self._reserved):
            if token in text:
                raise DataError(
                    f"{record.where}: its text has {token}, which stands for an image or a video: give images as "
                    '{"type": "image"}, and write the text without it'
                )

    def _process(self, images: list[Any]) -> tuple[dict[str, np.ndarray], list[str]]:
        """(the fields, the text that stands for each image). Raises ImageError."""
        try:
            found = self.processor(
                images=[images],
                text=[" ".join([self.mark] * len(images))],
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
        except Exception as error:  # of sides too unequal, say
            raise ImageError(f"the model's processor refuses it: {error}") from error
        if others := found.keys() - _UNUSED - {*IMAGE_FIELDS}:
            raise ValueError(
                f"{type(self.processor).__name__} gives {', '.join(sorted(others))} for images, which is not "
                f"supported; only {', '.join(IMAGE_FIELDS)} are"
            )
        fields = {name: np.asarray(found[name]) for name in IMAGE_FIELDS if name in found}
        if fields["pixel_values"].ndim == 5:  # of a batch, as of Idefics3
            fields = {name: values[0] for name, values in fields.items()}
        return fields, [each["replacement"] for each in found["text_replacement_offsets"][0]]
