"""Chats in a made-up language, for docs/tutorials/chats.md: python examples/chats_data.py FOLDER

    say seven red foxes              fola rimi me              the thing, its colour, how many
    opposite of big old foxes        fola sipi neva            the thing, each quality reversed
    count up from pi ba              pi ba, su ba, no de, ...  18, 19, 20, 21: digits, the ones first
    tell of red foxes and old boats  fola rimi, buto oda, ...  a story: these things, then others

One question in ten is held out: it is in no chat, so an answer to it needs the rule. A chat has 1 to 40 questions,
mostly few. Writes chats.jsonl (5,000 chats), held_out.jsonl, stories.jsonl and stories_held_out.jsonl (prompts
without answers, for docs/tutorials/grpo.md), config.json of a small Qwen2, and tokenizer/.
"""

from __future__ import annotations

import json
import math
import random
import sys
import zlib
from pathlib import Path

from odc_triton.data import to_transformers, train_tokenizer

DIGITS = ("no", "ba", "de", "fi", "go", "ku", "la", "me", "pi", "su")
COUNTS = dict(zip(("two", "three", "four", "five", "six", "seven", "eight", "nine"), DIGITS[2:], strict=True))
THINGS = {
    "foxes": "fola",
    "houses": "hano",
    "trees": "tiri",
    "rivers": "rivo",
    "birds": "bimi",
    "stones": "soto",
    "boats": "buto",
    "moons": "mono",
    "fish": "fisi",
    "lamps": "lapa",
    "clouds": "kalu",
    "doors": "doro",
}
COLOURS = {
    "red": "rimi",
    "blue": "balu",
    "green": "geno",
    "white": "wito",
    "black": "kuro",
    "yellow": "yalo",
    "grey": "gira",
    "brown": "bruna",
}
QUALITIES = {
    "big": "gumo",
    "small": "sipi",
    "old": "oda",
    "new": "neva",
    "warm": "wami",
    "cold": "keli",
    "fast": "fatu",
    "slow": "sulo",
}
OPPOSITES = (("big", "small"), ("old", "new"), ("warm", "cold"), ("fast", "slow"))
REVERSED = {one: other for pair in OPPOSITES for one, other in (pair, pair[::-1])}
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TEMPLATE = (
    '{% for m in messages %}{% if m.role == "assistant" %}<|completion|>{{ m.content }}<|end|>'
    "{% else %}<|prompt|>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|completion|>{% endif %}"
)


def number(value: int) -> str:
    """In digits, the ones first: 42 is `de go`."""
    return " ".join(DIGITS[int(digit)] for digit in reversed(str(value)))


def ask(generator: random.Random) -> tuple[str, str]:
    """A question and its answer."""
    pick = generator.choice
    kind = generator.choice(("opposite", "opposite", "tell", "count", "count", "say", "say"))
    thing, other = generator.sample([*THINGS], 2)
    if kind == "opposite":
        words = [pick(pair) for pair in generator.sample(OPPOSITES, 2)]
        turned = " ".join(QUALITIES[REVERSED[word]] for word in words)
        return f"opposite of {words[0]} {words[1]} {thing}", f"{THINGS[thing]} {turned}"
    if kind == "tell":
        colour, quality = pick([*COLOURS]), pick([*QUALITIES])
        story = [f"{THINGS[thing]} {COLOURS[colour]}", f"{THINGS[other]} {QUALITIES[quality]}"]
        words = [*COLOURS.values(), *QUALITIES.values()]
        story += [f"{pick([*THINGS.values()])} {pick(words)}" for _ in range(generator.randrange(7))]
        return f"tell of {colour} {thing} and {quality} {other}", ", ".join(story)
    if kind == "count":
        way, first = pick(["up", "down"]), generator.randrange(4, 96)
        numbers = [number(first + at if way == "up" else first - at) for at in range(4)]
        return f"count {way} from {numbers[0]}", ", ".join(numbers)
    colour, count = pick([*COLOURS]), pick([*COUNTS])
    return f"say {count} {colour} {thing}", f"{THINGS[thing]} {COLOURS[colour]} {COUNTS[count]}"


def is_held_out(question: str) -> bool:
    return zlib.crc32(question.encode()) % 10 == 0


def make_chat(generator: random.Random) -> list[dict[str, str]]:
    """Messages: questions that are not held out, and their answers."""
    turns = min(40, max(1, round(math.exp(generator.gauss(math.log(3), 0.8)))))
    messages: list[dict[str, str]] = []
    while len(messages) < 2 * turns:
        question, answer = ask(generator)
        if not is_held_out(question):
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def main(folder: Path) -> None:
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    chats = [make_chat(generator) for _ in range(5000)]
    write_lines(folder / "chats.jsonl", [{"messages": messages} for messages in chats])

    asked = dict(ask(generator) for _ in range(20_000))
    held_out = [(question, answer) for question, answer in asked.items() if is_held_out(question)]
    rules = [{"question": q, "answer": a} for q, a in held_out if not q.startswith("tell")]
    write_lines(folder / "held_out.jsonl", rules[:150])
    for name, questions in (
        ("stories_held_out", [q for q, _ in held_out if q.startswith("tell")][:200]),
        ("stories", [q for q in asked if q.startswith("tell") and not is_held_out(q)][:2000]),
    ):
        prompts = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
        write_lines(folder / f"{name}.jsonl", prompts)

    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    texts = (message["content"] for messages in chats for message in messages)
    tokenizer = to_transformers(train_tokenizer(texts, vocab_size=CONFIG["vocab_size"]))
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    print(f"{len(chats)} chats of {sum(map(len, chats)) // 2} questions; {len(rules[:150])} more are held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
