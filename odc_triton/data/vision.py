"""A model's processor: its tokenizer, and its image processor, of transformers.

Pictures are processed by Pillow and numpy: transformers' default image processors need torchvision. So do its video
processors, which a processor of a family with videos can't be made without: here it has None instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.files import reading

# One of them is in the folder of every processor.
_FILES = ("processor_config.json", "preprocessor_config.json")


def has_processor(source: str | os.PathLike) -> bool:
    """True for a folder with a processor's files."""
    return any(Path(source, name).is_file() for name in _FILES)


def read_processor(source: str | os.PathLike) -> Any:
    """Transformers' processor from a folder or hub id, for texts and pictures. Raises OSError and ValueError."""
    if importlib.util.find_spec("PIL") is None:
        raise ValueError(f'{source} has pictures, and they need Pillow: pip install "odc-triton[vision]"')
    from transformers import AutoProcessor

    with reading(str(source)), with_pillow():
        try:
            processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise ValueError(f"{source} has no processor that transformers can load: {error}") from error
    if not hasattr(processor, "image_processor"):
        raise ValueError(
            f"{source} has no image processor, only a {type(processor).__name__}: give the folder of a model that sees "
            f"pictures, with its {' or '.join(_FILES)}"
        )
    return processor


@contextmanager
def with_pillow() -> Iterator[None]:
    """Inside, processors are made with Pillow's image processors, and without video processors."""
    from transformers import processing_utils
    from transformers.processing_utils import ProcessorMixin

    names, check = (
        type(processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING),
        ProcessorMixin.check_argument_for_proper_class,
    )
    before = names._MAPPING_NAMES
    names._MAPPING_NAMES = before | {
        "image_processor": (__name__, "_PillowImages"),
        "video_processor": (__name__, "_NoVideos"),
    }
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
