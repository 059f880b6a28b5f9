"""Chat records with pictures, from a file to prepared samples, compared with transformers' processors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from odc_triton.data.dataset import DataOptions, TokenizedDataset
from odc_triton.data.prepared import prepare_data
from odc_triton.data.tokenizer import TextEncoder
from tests.support.processors import FAMILIES, encoded_picture, make_processor, picture
from tests.support.records import write_lines

SIZES = {"a.png": (20, 12), "b.png": (9, 33), "c.png": (16, 16), "d.png": (1, 1)}
IMAGE = {"type": "image"}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def user(*parts: dict) -> dict:
    return {"role": "user", "content": [*parts]}


def assistant(words: str) -> dict:
    return {"role": "assistant", "content": [text(words)]}


# Each: its messages as transformers wants them, with a picture's file under "image".
A, B, C, D = ({"type": "image", "image": name} for name in SIZES)
CONVERSATIONS = {
    "one picture": [user(A, text("the user asks")), assistant("yes, \n\nno")],
    "several, in several turns": [
        {"role": "system", "content": [text("and again")]},
        user(text("no"), A, text("and"), B),
        assistant("yes"),
        user(C),
        assistant("no and 😀 no"),
    ],
    "none": [user(text("the user")), assistant("says yes")],
    "one pixel, and the same twice": [user(D, A, A, text("asks")), assistant("no")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for seed, (name, size) in enumerate(SIZES.items()):
        (folder / name).write_bytes(encoded_picture(*size, seed=seed))
    return folder


@pytest.fixture(scope="module")
def processors():
    made = {}

    def of(family):
        return made.get(family) or made.setdefault(family, make_processor(family))

    return of


def prepared(folder, tmp_path, processor, *records, **options) -> TokenizedDataset:
    path = write_lines(folder / "data.jsonl", *records)
    return prepare_data(str(path), TextEncoder.of(processor), DataOptions(**options), folder=tmp_path / "kept")


def wanted_of(processor, messages, folder):
    """What the processor makes of a conversation, and where the assistant's words are among its tokens."""
    opened = [
        message
        | {
            "content": [
                part | {"image": picture(*SIZES[part["image"]], seed=list(SIZES).index(part["image"]))}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ]
        }
        for message in messages
    ]
    processor.video_processor = SimpleNamespace(num_frames=1, fps=1)  # SmolVLM's reads them
    try:
        found = processor.apply_chat_template(opened, tokenize=True, return_dict=True, return_tensors="np")
    finally:
        processor.video_processor = None
    of_batch = {"input_ids"} | (
        {"pixel_values", "pixel_attention_mask"} if found.get("pixel_attention_mask") is not None else set()
    )
    return {name: values[0] if name in of_batch else values for name, values in found.items()}


# What is learned besides the assistant's words: what follows the header, and what the template writes after them.
LEARNED = {
    "gemma3": ("", "<end_of_turn>\n"),
    "idefics3": (" ", "<end_of_utterance>\n"),
    "smolvlm": (" ", "<end_of_utterance>\n"),
    "llava": ("", " "),
} | dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), ("", "<|im_end|>\n"))


def learned(processor, sample) -> list[str]:
    """The text of each run of learned tokens."""
    marks = np.concatenate([[False], sample["labels"] != -100, [False]])
    edges = np.flatnonzero(np.diff(marks))
    assert all(sample["labels"][marks[1:-1]] == sample["input_ids"][marks[1:-1]])
    return [processor.tokenizer.decode(sample["input_ids"][a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_those_of_the_processor(family, folder, tmp_path, processors):
    processor = processors(family)
    data = prepared(folder, tmp_path, processor, *({"messages": each} for each in CONVERSATIONS.values()))
    assert len(data) == len(CONVERSATIONS)
    before, after = LEARNED[family]
    for index, messages in enumerate(CONVERSATIONS.values()):
        sample, wanted = data[index], wanted_of(processor, messages, folder)
        assert sample["input_ids"].tolist() == wanted["input_ids"].tolist()
        words = [each["content"][0]["text"] for each in messages if each["role"] == "assistant"]
        runs = learned(processor, sample)
        if family == "llava":  # whose marks may begin within a token, after its white space
            runs = [each.lstrip() for each in runs]
        assert runs == [f"{before}{each}{after}" for each in words]
        names = {"pixel_values", "image_grid_thw", "pixel_attention_mask"} & wanted.keys()
        has_pictures = {"mm_token_type_ids"} if "pixel_values" in names else set()
        assert sample.keys() - {"input_ids", "labels"} == names | has_pictures
        for name in names:
            np.testing.assert_array_equal(sample[name], wanted[name])
            assert sample[name].dtype == wanted[name].dtype
        types = sample.get("mm_token_type_ids", np.zeros_like(sample["input_ids"]))
        for name in {"mm_token_type_ids", "token_type_ids"} & wanted.keys():
            assert types.tolist() == wanted[name][0].tolist()
        assert data.floors[index] == max(np.flatnonzero(types), default=-1) + 1
        pixels = sample.get("pixel_values", np.empty(0))
        assert sum(data.pictures[index]) == pixels.size
        units = len(sample["image_grid_thw"]) if "image_grid_thw" in sample else len(pixels)
        assert len(data.pictures[index]) == units
    assert sum(data.shown.arrays["picture_bytes_ends"] > 0) == 4  # d, a, b and c, once each
