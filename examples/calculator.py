"""A tool in GRPO: a model learns to ask a calculator for the products that it can't compute.

    python examples/calculator.py out/calculator
    odc-triton train sft --data out/calculator/taught.jsonl --init out/calculator/config.json \
        --tokenizer out/calculator/tokenizer.json --out out/calculator/sft --ranks 2 \
        --steps 200 --samples-per-rank 32 --token-cap 1024 --lr 2e-3 --warmup-steps 20
    odc-triton train grpo --data out/calculator/questions.jsonl --eval-data out/calculator/held_out.jsonl \
        --rollout examples.calculator:rollout --reward examples.calculator:right \
        --model out/calculator/sft/model --out out/calculator/grpo --ranks 2 --eval-samples 4 \
        --steps 20 --prompts-per-rank 16 --max-new-tokens 32 --token-cap 1024 --lr 2e-4

The first command writes questions such as 512*640. Seven of ten answers to be taught from are =?, I don't know; in the
others the calculator is asked, <512*640>, its output is [327680], and the answer =327680. The reward is for right
answers only, so the model learns to ask. It can't multiply: without --rollout it learns nothing.
"""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import islice
from pathlib import Path

ASKS = 0.3  # of the answers that are taught
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def rollout(prompts, engine):
    """Each completion until it ends. After a call comes its result, which is not learned."""
    (end_of_call,) = engine.tokenizer.encode(">", add_special_tokens=False)
    most = engine.options.max_new_tokens
    ids, logprobs, mask = ([[] for _ in prompts] for _ in range(3))
    rows = range(len(prompts))
    while rows:
        tokens = [engine.prompt_ids[row] + ids[row] for row in rows]
        turns = engine.generate(tokens, rows=rows, stop_tokens=[end_of_call])
        called = []
        for row, turn in zip(rows, turns, strict=True):
            output = []
            if turn.ids[-1:] == [end_of_call]:
                result = calculate(engine.tokenizer.decode(ids[row] + turn.ids))
                output = engine.tokenizer.encode(f"[{result}]", add_special_tokens=False)
            if output and len(ids[row] + turn.ids + output) < most:
                called.append(row)
            else:
                output = []
            ids[row] += turn.ids + output
            logprobs[row] += turn.logps + [None] * len(output)
            mask[row] += [1] * len(turn.ids) + [0] * len(output)
        rows = called
    columns = {"completion_ids": ids, "logprobs": logprobs, "env_mask": mask}
    return {"prompt_ids": engine.prompt_ids} | columns


def calculate(text):
    """The result of the call at the end of the text, or ? if it is none."""
    call = re.search(r"<(\d+)\*(\d+)>$", text.replace(" ", ""))
    return int(call[1]) * int(call[2]) if call else "?"


def right(completions, answer, **columns):
    """1 for the right answer, which is what follows the last =."""
    return [float(text.rpartition("=")[2] == wanted) for text, wanted in zip(completions, answer, strict=True)]


def write(folder, seed=0, taught=20_000, questions=4_000, held_out=200):
    """Writes taught.jsonl, questions.jsonl, held_out.jsonl, config.json and tokenizer.json."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    factors = range(320, 1000)  # so products have six digits
    pairs = iter(generator.sample([(a, b) for a in factors for b in factors], taught + questions + held_out))
    for name, count in (("taught", taught), ("questions", questions), ("held_out", held_out)):
        lines = [{"prompt": f"{a}*{b}", "answer": f"{a * b}"} for a, b in islice(pairs, count)]
        for line in lines if name == "taught" else ():
            product, answer = line["prompt"], line["answer"]
            line["completion"] = f"<{product}>[{answer}]={answer}" if generator.random() < ASKS else "=?"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate("0123456789*<>[]=?")}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>", "<|prompt|>", "<|completion|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    write(*sys.argv[1:2], *map(int, sys.argv[2:]))
