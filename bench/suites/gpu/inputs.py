"""What the stages' programs are given: configs, text and lengths, made once, without a network."""

from __future__ import annotations

import json
import math
import random
import sysconfig
from pathlib import Path
from typing import Any

from ...stdlib_corpus import build_corpus, write_text

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "max_position_embeddings")


def _qwen(*sizes: int) -> dict[str, Any]:
    rest = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    return dict(zip(_SIZES, sizes, strict=True)) | rest


QWEN_1_5B = _qwen(151936, 1536, 8960, 28, 12, 2, 32768)
LONGEST = 6144  # tokens of a sample and of a pack: 8,192 may not fit in 80 GB, beside the states
TINY = _qwen(128, 32, 64, 1, 2, 1, 64)
TRAINED = _qwen(4096, 512, 1408, 8, 8, 4, 2048) | {"tie_word_embeddings": False}  # 100 steps take seconds on a GPU
TRAINED_TINY = TINY | {"vocab_size": 512, "max_position_embeddings": 256}


def long_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """LongAlign's lengths (mean 16.5 K, at most 64 K tokens), scaled down to `longest`: log-normal."""
    generator = random.Random(seed)
    middle = math.log(longest / 6.2)  # the ratio of LongAlign's longest to its median
    return [min(max(int(generator.lognormvariate(middle, 1.0)), 16), longest) for _ in range(count)]


def write_inputs(folder: Path, *, rehearse: bool) -> Path:
    """model.json, lengths.txt; data.jsonl, tokenizer.json and config.json of a training on the standard library."""
    model: dict[str, Any] = TINY if rehearse else QWEN_1_5B
    done = folder / "model.json"  # written last
    if not done.exists() or json.loads(done.read_text()) != model:
        folder.mkdir(parents=True, exist_ok=True)
        records, _ = build_corpus(Path(sysconfig.get_path("stdlib")) / ("email" if rehearse else ""))
        records = random.Random(0).sample(records, min(200 if rehearse else 3000, len(records)))
        write_text(folder, records, TRAINED_TINY if rehearse else TRAINED)
        lengths = long_lengths(256, 64 if rehearse else LONGEST)
        (folder / "lengths.txt").write_text("".join(f"{length}\n" for length in lengths))
        done.write_text(json.dumps(model))
    return folder
