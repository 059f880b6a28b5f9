"""Tools for TRL's trainers: functions, an environment, a tokenizer whose template has them, and who calls them when."""

from __future__ import annotations

from functools import cache
from typing import Any

from odc_triton.data.tokenizer import to_transformers, train_tokenizer

VOCABULARY = 602
WORDS = "yes no and again the user asks <tool_call>\n</tool_call>"


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their sum.
    """
    return a + b


class Account:
    """An environment that keeps a sum, and rewards it."""

    def reset(self, **_: Any) -> str:
        self.total = 0
        return " the user asks"

    def add(self, a: int, b: int) -> int:
        """Adds to the sum.

        Args:
            a: A number.
            b: Another one.

        Returns:
            The sum.
        """
        self.total += a + b
        return self.total

    def get_reward(self) -> float:
        return self.total / 10


@cache
def tokenizer() -> Any:
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template as template

    raw = train_tokenizer([template, WORDS] * 9, vocab_size=VOCABULARY - 2)
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    found = to_transformers(raw)
    found.chat_template, found.eos_token = template, "<|im_end|>"
    return found


def completion(step: int, index: int, prompt: list[int]) -> list[int]:
    """Of four completions two begin with a call, and one with a call of a tool that is not there; then some call again,
    and some do not end."""
    answers = tokenizer().decode(prompt).count("<tool_response>")
    number = sum(prompt) if answers else index
    said = " yes and no" * (number % 5) + "<|im_end|>" * (number % 3 > 0)
    if (answers == 0 and number % 4) or (answers == 1 and number % 2):
        name = "add" if number % 4 < 3 else "nothing"
        said = (
            f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": {step + index}, "b": 4}}}}\n</tool_call><|im_end|>'
        )
    return tokenizer()(said or " no")["input_ids"]
