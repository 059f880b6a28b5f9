"""Pictures in a run of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..balance import TowerCost
from ..data.records import DataError, Record
from ..data.tokenizer import read_config
from ..data.vision import has_processor, read_processor
from ..hf.enable import innermost
from ..hf.images import continues_pictures, sees_pictures, trains_tower
from .sft_options import SftOptions

Item, Made = TypeVar("Item"), TypeVar("Made")


def load_processor(options: SftOptions) -> Any | None:
    """The processor of a model that sees pictures; None: the run is of text alone. Raises OSError and ValueError."""
    source = options.tokenizer or options.model
    if not sees_pictures(read_config(options.model or options.init)):
        return None
    return read_processor(source) if has_processor(source) or not Path(source).exists() else None


def require_processor(options: SftOptions, records: Iterable[Record]) -> None:
    """Raises DataError for a record with pictures, of a run without `load_processor`."""
    for record in records:
        if record.pictures:
            model = options.model or options.init
            raise DataError(
                f"{record.where} has pictures, and {model} has no processor for them in {options.tokenizer or model}: "
                f"give the folder of a model that sees pictures as --model, or leave them out"
                if sees_pictures(config := read_config(model))
                else f"{record.where} has pictures, and {model} is a {config.model_type}, which sees none in a pack: "
                f"give a --model of a family that does (docs/models.md), or leave them out"
            )


def require_continuing(config: Any, options: SftOptions) -> None:
    """Raises ValueError if a model of this config can't complete held-out prompts with pictures."""
    if options.eval_samples and not continues_pictures(config):
        raise ValueError(
            f"--eval-samples: a {config.model_type} can't generate from pictures on the attention of packs: leave it "
            f"out, or give --eval-data without pictures"
        )


def tower_costs(model: nn.Module, pictures: list[list[int]] | None) -> list[float] | None:
    """What each sample costs besides its tokens. `pictures`: as `Samples` have them."""
    if pictures is None:
        return None
    tower = TowerCost.from_config(innermost(model).config, trained=trains_tower(model))
    return [tower.sample(values) for values in pictures]


def one_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """`make` of each item, in order. While one is used, a thread makes the next: reading and resizing a picture takes
    about as long as its step in the vision tower.
    """
    with ThreadPoolExecutor(max_workers=1) as thread:
        upcoming: Future[Made] | None = None
        for item in items:
            former, upcoming = upcoming, thread.submit(make, item)
            if former is not None:
                yield former.result()
        if upcoming is not None:
            yield upcoming.result()
