"""A task for reinforcement learning on a CPU: sort the digits of a number, 3 to 40 of them, mostly few.

A completion is as long as its prompt, so lengths vary by nature, and its tail is heavy. The examples to be taught from
are sorted up or down by chance, as if of mixed quality; the reward wants them up. So what is taught is how to sort, and
what is rewarded is a choice: more examples can't make it.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from odc_triton.jobs.data.tokenizer import COMPLETION, END, PROMPT

from .stdlib_corpus import qwen2

FEWEST, MOST = 3, 40
UP = 0.3
CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]} | qwen2(16, 128, 512, 6, 4, 4, 128, True)


def digits(generator: random.Random) -> str:
    """A number: lengths are log-normal, a median of 10 digits, one in eight over 20."""
    length = round(math.exp(generator.gauss(math.log(10), 0.6)))
    return "".join(generator.choice("0123456789") for _ in range(min(max(length, FEWEST), MOST)))


def in_order(number: str, *, down: bool = False) -> str:
    return "".join(sorted(number, reverse=down))


def credit(completion: str, answer: str) -> float:
    """1 for the exact answer; else up to a half, for the share of it that is right before the first mistake."""
    if completion == answer:
        return 1.0
    wrong = (place for place, (made, right) in enumerate(zip(completion, answer, strict=False)) if made != right)
    return 0.5 * next(wrong, min(len(completion), len(answer))) / len(answer)


def sorted_reward(
    prompts: Sequence[str], completions: Sequence[str], answer: Sequence[str], **_: object
) -> list[float]:
    """Of the job's `--reward bench.sorting:sorted_reward`."""
    return [credit(made, right) for made, right in zip(completions, answer, strict=True)]


def random_reward(completions: Sequence[str], **_: object) -> list[float]:
    """A control: says nothing about a completion, and depends on nothing else than its text and the moment."""
    return [random.random() for _ in completions]


def write_task(folder: Path, *, seed: int, taught: int, prompts: int, held_out: int) -> None:
    """Writes sft.jsonl, prompts.jsonl, held_out.jsonl, config.json and tokenizer.json; no number is in two of them.

    In sft.jsonl `UP` of the answers are sorted up, the others down.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(f"sorting {seed}")
    numbers: dict[str, None] = {}
    while len(numbers) < taught + prompts + held_out:
        numbers[digits(generator)] = None
    rest = iter(numbers)
    for name, count in (("held_out", held_out), ("sft", taught), ("prompts", prompts)):
        of_kind = list(islice(rest, count))
        if name == "sft":
            pairs = [{"prompt": n, "completion": in_order(n, down=generator.random() >= UP)} for n in of_kind]
        else:
            pairs = [{"prompt": number, "answer": in_order(number)} for number in of_kind]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json, whose tokens are digits."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END, PROMPT, COMPLETION])
    tokenizer.save(str(folder / "tokenizer.json"))
