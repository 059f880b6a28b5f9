"""Tokenizers with chat templates, created here, and what each template should write, in plain Python."""

from __future__ import annotations

from collections.abc import Callable

from odc_triton.jobs.data.tokenizer import to_transformers, train_tokenizer

Segments = list[tuple[str, bool]]  # (text, is learned)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|eot|>", "<|begin|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
SPACED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant{{ '\n' }}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m['role'] }}{{ '\n' }}{{ m['content'] }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
# Marks around the words alone, so that the end is not learned.
MARKED_WORDS = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
LLAMA = (
    "<|begin|>{% for m in messages %}<|header|>{{ m['role'] }}<|/header|>{{ '\n\n' }}{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|/header|>{{ '\n\n' }}{% endif %}"
)
# Drops a message's reasoning once a later message follows.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('</think>')[-1] }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _writer(
    header: str, end: str, *, after: str = "", before: str = "", strips: bool = False
) -> Callable[[list[dict]], Segments]:
    """`end`: of what is learned of a message; `after`: what follows that."""

    def write(messages: list[dict]) -> Segments:
        segments = [(before, False)]
        for message in messages:
            content = message["content"].strip() if strips else message["content"]
            segments += [(header.format(message["role"]), False), (content + end, message["role"] == "assistant")]
            segments.append((after, False))
        return [each for each in segments if each[0]]

    return write


chatml = _writer("<|im_start|>{}\n", "<|im_end|>\n")
WRITERS: dict[str, tuple[str, Callable[[list[dict]], Segments]]] = {
    "chatml": (CHATML, chatml),
    "marked": (MARKED, _writer("<|im_start|>{}\n", "<|im_end|>", after="\n")),
    "marked words": (MARKED_WORDS, _writer("<|im_start|>{}\n", "", after="<|im_end|>\n")),
    "llama": (LLAMA, _writer("<|header|>{}<|/header|>\n\n", "<|eot|>", before="<|begin|>", strips=True)),
}


# How Llama 3 splits text: line feeds stay together, whatever follows. GPT-2's way, which is ours, joins the last of
# several to what follows, so a header that ends in two has other tokens when nothing follows.
LLAMA_SPLIT = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def said(*contents: str) -> list[dict]:
    """User and assistant in turn."""
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]


def make_tokenizer(template: str | None):
    """transformers' class, byte-level, with a vocabulary learned from a little text with runs of white space."""
    from tokenizers import Regex, pre_tokenizers

    raw = train_tokenizer(
        ["the user asks\n\n\nand  the assistant says yes, \n\nno and again yes\n\n"] * 9, vocab_size=330
    )
    raw.add_special_tokens(SPECIAL)
    if template == LLAMA:
        split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated")
        raw.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    tokenizer = to_transformers(raw)
    tokenizer.chat_template = template
    return tokenizer
