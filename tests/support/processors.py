"""Processors of families that see images, created here, with small images and tiny tokenizers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from odc_triton.checkpoint.write_pretrained import save_processor as save_processor
from odc_triton.jobs.data.vision import with_pillow
from tests.support.chats import make_tokenizer
from tests.support.versions import since

WITHOUT_TORCHVISION = since("5.23", "processors need torchvision")

_QWEN = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in p %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<start_of_image>{% else %}{{ p['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# It needs contents as lists: of a string it writes nothing.
_SMOL = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% elif p['type'] == 'image' %}<image>"
    "{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_LLAVA = (
    "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'] | upper }}: {% endif %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ p['text'] + ' ' }}{% endgeneration %}{% else %}{{ p['text'] + ' ' }}{% endif %}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def _tokenizer(template: str, *special: str, bos: str | None = None, **named: str) -> Any:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, *named.values()]})
    if bos is not None:  # as Llama's and Gemma's tokenizers add it
        tokenizer.add_special_tokens({"bos_token": bos})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
    tokenizer._set_model_specific_special_tokens(named)  # so that it has attributes of these names
    return tokenizer


def _qwen(kind: str) -> Any:
    import transformers
    from transformers import Qwen2VLImageProcessorPil

    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32})
    tokenizer = _tokenizer(_QWEN, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    return getattr(transformers, kind)(images, tokenizer, None, chat_template=_QWEN)


def _gemma3() -> Any:
    from transformers import Gemma3ImageProcessorPil, Gemma3Processor

    named = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
    tokenizer = _tokenizer(_GEMMA, "<start_of_turn>", "<end_of_turn>", bos="<bos>", **named)
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    return Gemma3Processor(images, tokenizer, chat_template=_GEMMA, image_seq_length=4)


_TILES = ["<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"]
_TILES += [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]


def _idefics(name: str, *videos: None) -> Any:
    import transformers
    from transformers.models.smolvlm import processing_smolvlm

    processing_smolvlm.num2words = processing_smolvlm.num2words or str  # a package that it uses for videos alone
    sizes = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    images = getattr(transformers, f"{name}ImageProcessorPil")(**sizes)
    made = images, _tokenizer(_SMOL, *_TILES), *videos
    return getattr(transformers, f"{name}Processor")(*made, image_seq_len=4, chat_template=_SMOL)


def _llava() -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    tokenizer = _tokenizer(_LLAVA, "<image>", bos="<s>")
    return LlavaProcessor(images, tokenizer, patch_size=4, vision_feature_select_strategy="full", chat_template=_LLAVA)


_PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen("Qwen2VLProcessor"),
    "qwen2_5_vl": lambda: _qwen("Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen("Qwen3VLProcessor"),
    "gemma3": _gemma3,
    "idefics3": lambda: _idefics("Idefics3"),
    "smolvlm": lambda: _idefics("SmolVLM", None),
    "llava": _llava,
}
FAMILIES = tuple(_PROCESSORS)


def make_processor(family: str) -> Any:
    """A new processor with the sizes of `tests.support.vision`: patches of 4 x 4 pixels, other images 16 x 16."""
    with with_pillow():
        return _PROCESSORS[family]()


def image(width: int = 20, height: int = 12, seed: int = 0) -> Any:
    """A Pillow image of noise."""
    from PIL import Image

    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def encoded_image(width: int = 20, height: int = 12, seed: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image(width, height, seed).save(file, kind)
    return file.getvalue()
