"""Runs what an extra of the installed package is for, on two ranks with a tiny model: `.ci/try-release` gives its name.

The last line printed says what ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

PYTHON = sys.executable
LOGGERS = ("tensorboard", "wandb", "trackio", "mlflow", "swanlab")
os.environ |= {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}


def run(*command: str) -> str:
    """What `python COMMAND` prints; its failure ends this program with its last lines."""
    ran = subprocess.run([PYTHON, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode:
        sys.exit(f"{command} exited with {ran.returncode}:\n{ran.stdout[-3000:]}")
    return ran.stdout


def torchrun(example: Path, *given: str) -> str:
    run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example), *given)
    return f"{example.name} under torchrun"


def model_folder() -> None:
    """A model of a few thousand parameters with its tokenizer in `tiny`, and `train.jsonl`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    records = [{"prompt": f"{start} ", "completion": f"{start + 1} {start + 2}"} for start in range(64)]
    Path("train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        [], trainers.BpeTrainer(vocab_size=260, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")


def train(name: str, *given: str, data: str = "train.jsonl") -> str:
    """`odc-triton train sft` on two ranks, which leaves a model or an adapter."""
    model_folder()
    command = ("-m", "odc_triton.tools.cli", "train", "sft", "--data", data, "--model", "tiny", "--ranks", "2")
    run(*command, "--out", f"run-{name}", "--steps", "3", *given)
    if not [*Path(f"run-{name}").glob("*/*model.safetensors")]:
        sys.exit(f"run-{name} has no weights")
    return " ".join(["train sft", *given])


def as_parquet() -> str:
    from datasets import Dataset

    model_folder()
    Dataset.from_json("train.jsonl").to_parquet("train.parquet")
    return "train.parquet"


def fetch_png() -> None:
    """Reads a PNG by its URL, as `train --fetch-images` does."""
    from PIL import Image

    from odc_triton.jobs.data.image_files import decode_image, read_image

    Image.new("RGB", (8, 8)).save("image.png")
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        image = decode_image(read_image(f"http://127.0.0.1:{server.server_port}/image.png", None, fetch=True))
        server.shutdown()
    if image.size != (8, 8):
        sys.exit(f"image.png has the size {image.size}")


def main(extra: str, examples: Path) -> None:
    match extra:
        case "none" | "source":
            done = torchrun(examples / "loop.py") + ", " + train(extra)
        case "plot":
            done = train(extra)
            if "data:image/png" not in Path(f"run-{extra}/report.html").read_text():
                sys.exit("report.html has no images")
        case "data":
            done = train(extra, data=as_parquet()) + " on a Parquet file"
        case "vision":
            fetch_png()
            done = torchrun(examples / "images.py") + ", an image fetched"
        case "peft":
            done = train(extra, "--lora-rank", "4")
        case "quantize":
            done = train(extra, "--lora-rank", "4", "--quantize", "nf4", "--optimizer", "adamw-8bit")
        case "trainer":
            done = torchrun(examples / "accelerate_fsdp2.py")
        case "trl" if sys.version_info >= (3, 11):
            done = torchrun(examples / "trl_sft.py", "trl")
        case "trl":
            done = "nothing, TRL needs Python 3.11"
        case "demo":
            from odc_bench.demo import text_of

            done = f"the demo's text, {text_of(Path('demo')).size:,} tokens"
        case _ if extra in LOGGERS:
            done = train(extra, "--report-to", extra)
        case _:
            sys.exit(f"no program tries the extra {extra!r}: add one to .ci/try_extra.py")
    print(done)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
