"""Images in a run of supervised fine-tuning."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...base.environment import needs_transformers
from ...checkpoint.adapted import read_config
from ...packs.images import sees_images
from ..data.records import DataError, Record
from ..data.templates import with_template
from ..data.tokenizer import require_tokens
from ..data.vision import has_processor, read_processor
from .sample_options import SampleOptions


def load_processor(options: SampleOptions) -> Any | None:
    """The processor of a model that sees images; None: the run is of text alone. Raises OSError and ValueError."""
    if _why_blind(options) is not None:
        return None
    source, config = options.tokenizer or options.architecture, read_config(options.architecture)
    processor = with_template(read_processor(source), options.chat_template)
    require_tokens(processor.tokenizer, source)
    token = getattr(config, "image_token_id", None)
    if token not in (known := getattr(processor, "image_token_ids", [token])):
        raise ValueError(
            f"{source} has {known} for the tokens of images, and the model's config has image_token_id {token}: give "
            f"the model's own --tokenizer"
        )
    return processor


def _why_blind(options: SampleOptions) -> str | None:
    """What keeps a run from seeing images, and the remedy."""
    model, source = options.architecture, options.tokenizer or options.architecture
    if not sees_images(config := read_config(model)):
        return f"{model} is a {config.model_type}, which sees none in a pack: give a --model that does (docs/models.md)"
    if Path(source).exists() and not has_processor(source):
        return f"{source} has no processor for them: give the folder of a model that sees images"
    if importlib.util.find_spec("PIL") is None:
        return 'Pillow is not installed: pip install "odc-triton[vision]"'
    if needs := needs_transformers("5.23"):  # an older one makes processors with torchvision
        return f"reading them {needs}: install that"
    return None


def require_processor(options: SampleOptions, records: Iterable[Record]) -> None:
    """Raises DataError for a record with images, of a run without `load_processor`."""
    seen = next((each for each in records if each.images), None)
    if seen is not None:
        raise DataError(f"{seen.where} has images, and {_why_blind(options)}, or leave them out")
