"""Chat templates in place of a tokenizer's own: from a file, or by name. Imports no torch."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

# chatml as in transformers' documentation, llama3 as in Meta-Llama-3-8B-Instruct.
TEMPLATES = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
}


def read_template(name: str | os.PathLike) -> str:
    """The text of a template, one of `TEMPLATES` or a file. Raises ValueError."""
    if name in TEMPLATES:
        return TEMPLATES[str(name)]
    close = difflib.get_close_matches(str(name), TEMPLATES, n=1)
    meant = f"did you mean {close[0]}? Otherwise give" if close else "give"
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(
            f"--chat-template is {name}, which can't be read ({why}): {meant} a jinja file, or {' or '.join(TEMPLATES)}"
        ) from error
    if not text.strip():
        raise ValueError(f"--chat-template is {name}, which is empty: give a jinja file, or {' or '.join(TEMPLATES)}")
    return text


def with_template(reader: Any, name: str | os.PathLike | None) -> Any:
    """`reader`, a tokenizer or processor, with that template instead of its own; None: as it is. Raises ValueError."""
    if name is None:
        return reader
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    text = read_template(name)
    try:
        render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template=text)
    except TemplateSyntaxError as error:
        raise ValueError(f"--chat-template {name}, line {error.lineno}, is not valid jinja: {error.message}") from error
    except Exception:  # for a conversation that it refuses: that of the data counts
        pass
    for each in (reader, getattr(reader, "tokenizer", reader)):
        each.chat_template = text
    return reader
