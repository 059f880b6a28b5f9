"""A small run on images: a model that sees them with its processor, and chats that ask for an image's colour."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from odc_triton.jobs.train.sft_options import SftOptions
from tests.support.deadlines import LONG_S
from tests.support.processors import make_processor, save_processor
from tests.support.vision import FAMILIES

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 230), "white": (240, 240, 240)}


def write_model(folder: Path, family: str, *, weights: bool = False, like: str | None = None) -> Path:
    """Config and processor, by default the family's own, and with `weights` random ones."""
    processor = make_processor(like or family)
    folder.mkdir(parents=True)
    save_processor(processor, folder)
    model = FAMILIES[family].model()
    fit_vocabulary(model, processor)
    model.config.architectures = [type(model).__name__]
    if weights:
        model.save_pretrained(folder)
    else:
        model.config.save_pretrained(folder)
    return folder


def fit_vocabulary(model: Any, processor: Any) -> None:
    """Gives the model and its config the processor's tokens."""
    model.resize_token_embeddings(len(processor.tokenizer))
    tokens = {"image_token_id": processor.tokenizer.convert_tokens_to_ids(image_token(processor))}
    for name in ("vision_start", "vision_end", "video_pad"):
        known = processor.tokenizer.get_vocab().get(f"<|{name}|>")
        if known is not None:
            tokens[f"{name.replace('_pad', '')}_token{'_id'}"] = known
    for name, value in tokens.items():
        setattr(model.config, name, value)


def image_token(processor: Any) -> str:
    """The token that stands for a part of an image in `input_ids`."""
    return getattr(processor.tokenizer, "image_token", None) or processor.image_token


def write_image(path: Path, colour: str, generator: random.Random) -> None:
    """A PNG of 12 to 40 pixels a side."""
    from PIL import Image

    sides = generator.randint(12, 40), generator.randint(12, 40)
    near = tuple(min(255, max(0, value + generator.randint(-20, 20))) for value in COLOURS[colour])
    Image.new("RGB", sides, near).save(path)


def ask(images: list[str], answer: str) -> dict[str, Any]:
    question = [{"type": "image"} for _ in images] + [{"type": "text", "text": "?"}]
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]
    return {"messages": turns, "images": images}


def write_records(folder: Path, name: str, *, asked: int, text: int, seed: int = 0) -> Path:
    """JSON lines: of each colour `asked` questions about one or two images, and `text` of text, mixed."""
    generator, records = random.Random(seed), []
    (folder / name).mkdir(parents=True)
    for number in range(asked):
        for colour in COLOURS:
            paths = [f"{name}/{colour}-{number}-{place}.png" for place in range(1 + number % 2)]
            for path in paths:
                write_image(folder / path, colour, generator)
            records.append(ask(paths, colour[0]))
    for number in range(text):
        words = [{"role": "user", "content": f"say {number % 10}"}, {"role": "assistant", "content": str(number % 10)}]
        records.append({"messages": words})
    generator.shuffle(records)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def of_model(folder: Path) -> dict[str, str | None]:
    """The options of the model in `folder`, with its processor: with random weights, if it has none."""
    if (folder / "model.safetensors").exists():
        return {"model": str(folder), "init": None, "tokenizer": None}
    return {"init": str(folder / "config.json"), "tokenizer": str(folder)}


def case(folder: Path, **changes: object) -> SftOptions:
    """Options of a run of the model in `folder`/model with random weights."""
    wanted = {
        "data": str(folder / "learned.jsonl"),
        **of_model(folder / "model"),
        "out": str(folder / "out"),
        "steps": 4,
        "samples_per_rank": 4,
        "token_cap": 128,
        "lr": 3e-3,
        "warmup_steps": 2,
        "timeout_minutes": LONG_S / 60,
    }
    return SftOptions(**wanted | changes)
