"""What the command takes around a job's steps: `python -m bench.reports.startup --against FOLDER [--out FILE]`.

FOLDER is another checkout, of before. Its `odc-triton train sft` and this one's take turns, with the same Python: two
steps of a tiny model, a record that is refused, and an option that is. Ratios are this one's time over the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from odc_triton.base.report import table
from odc_triton.data.tokenizer import save_tokenizer, train_tokenizer

from ..harness import bootstrap_ratio
from ..provenance import ROOT, about, save_json

CONFIG = {"model_type": "qwen2", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}
COMMAND = "train sft --data data.jsonl --init config.json --tokenizer tokenizer.json --steps 2 --samples-per-rank 2"
START = [sys.executable, "-c", "import sys; from odc_triton.cli import main; sys.exit(main())", *COMMAND.split()]


def write_case(folder: Path, checkouts: dict[str, Path]) -> None:
    texts = (ROOT / "LICENSE").read_text().split("\n\n")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "wrong.jsonl").write_text('{"txt": "a"}\n')
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(train_tokenizer(texts, vocab_size=CONFIG["vocab_size"]), folder / "tokenizer.json")
    for name, checkout in checkouts.items():  # as packages that come before installed ones
        (folder / name).mkdir()
        (folder / name / "odc_triton").symlink_to(checkout.resolve() / "odc_triton")
        (folder / name / "odc_kernels").symlink_to(checkout.resolve() / "kernels")


def seconds(name: str, folder: Path, status: int, words: list[str]) -> float:
    """Of one run of the checkout `name`, which must end with `status`."""
    environment = os.environ | {"PYTHONPATH": str(folder / name)}
    with tempfile.TemporaryDirectory() as out:
        start_s = time.monotonic()
        ended = subprocess.run([*START, "--out", out, *words], cwd=folder, env=environment, capture_output=True)
        taken_s = time.monotonic() - start_s
    if ended.returncode != status:
        raise RuntimeError(f"{name}: {' '.join(words)} ended with {ended.returncode}: {ended.stderr.decode()}")
    return taken_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, required=True, help="another checkout")
    parser.add_argument("--ranks", type=int, default=2, help="of the job (default: 2)")
    parser.add_argument("--runs", type=int, default=7, help="of each, after one that does not count (default: 7)")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    checkouts = {"here": ROOT, "there": options.against}
    git = ["git", "-C", str(options.against), "rev-parse", "HEAD"]
    there = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    works = {
        f"two steps on {options.ranks} ranks": (0, ["--ranks", str(options.ranks)]),
        "two steps on 1 rank": (0, []),
        "a record is refused": (1, ["--data", "wrong.jsonl"]),
        "an option is refused": (2, ["--clip-norm", "-1"]),
    }
    taken: dict[str, dict[str, list[float]]] = {}
    rows, ratios = [], {}
    with tempfile.TemporaryDirectory() as folder:
        write_case(Path(folder), checkouts)
        for work, (status, words) in works.items():
            turns = [
                [seconds(name, Path(folder), status, words) for name in checkouts] for _ in range(options.runs + 1)
            ]
            taken[work] = dict(zip(checkouts, map(list, zip(*turns[1:], strict=True)), strict=True))
            ratios[work] = ratio = bootstrap_ratio(*taken[work].values())
            medians = [f"{statistics.median(each):.2f}" for each in taken[work].values()]
            rows.append([work, *medians, f"{ratio['ratio']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}"])
            print(f"{work}: {ratio['ratio']:.2f}", flush=True)
    print(table(rows, ("", "s here", "s there", "ratio", "95%")))
    if options.out:
        save_json(options.out, about() | {"against": there, "seconds": taken, "ratios": ratios})


if __name__ == "__main__":
    main()
