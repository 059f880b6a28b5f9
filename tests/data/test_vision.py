"""Processors of models that see images: read from a folder, with Pillow."""

from __future__ import annotations

import importlib.util
import json

import pytest

from odc_triton.jobs.data.vision import has_processor, read_processor
from tests.support.chats import CHATML, make_tokenizer
from tests.support.processors import FAMILIES, WITHOUT_TORCHVISION, make_processor, save_processor

pytestmark = WITHOUT_TORCHVISION


@pytest.mark.parametrize("family", FAMILIES)
def test_processor_of_a_folder(tmp_path, family):
    made = make_processor(family)
    assert not has_processor(tmp_path)
    save_processor(made, tmp_path)
    assert has_processor(tmp_path)
    read = read_processor(tmp_path)
    assert type(read) is type(made)
    assert type(read.image_processor).__name__.endswith("Pil")
    assert (read.to_json_string(), read.chat_template) == (made.to_json_string(), made.chat_template)
    assert read.tokenizer.get_vocab() == made.tokenizer.get_vocab()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3", "llava"])
def test_processor_of_separate_files(tmp_path, family):
    """As many models on the hub have them, with the names of the torchvision classes."""
    made = make_processor(family)
    made.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": made.chat_template}))
    name, rest = type(made).__name__, {each: value for each, value in made.to_dict().items() if value is not None}
    images = rest.pop("image_processor") | {"processor_class": name}
    images["image_processor_type"] = images["image_processor_type"].removesuffix("Pil")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    if rest.keys() - {"processor_class"}:
        (tmp_path / "processor_config.json").write_text(json.dumps(rest))
    read = read_processor(tmp_path)
    assert (type(read), read.to_json_string()) == (type(made), made.to_json_string())
    assert type(read.image_processor) is type(made.image_processor)


def test_folder_without_an_image_processor_is_refused(tmp_path):
    make_tokenizer(CHATML).save_pretrained(tmp_path)
    assert not has_processor(tmp_path)
    with pytest.raises(ValueError, match=r"has no image processor, only a .*: give the folder of a model that sees"):
        read_processor(tmp_path)
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2VLProcessor"}')
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        read_processor(tmp_path)


def test_missing_pillow_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'need Pillow: pip install "odc-triton\[vision\]"'):
        read_processor(tmp_path)
