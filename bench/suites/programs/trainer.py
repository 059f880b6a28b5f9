"""transformers' Trainer under transformers' own FSDP2, one training after another, as anybody would write it.

    torchrun --nproc-per-node 2 trainer.py FOLDER CELLS.json

Writes the seconds of each step, by cell, and the weights after the last one. Nothing here knows of odc-triton.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.distributed import DistributedConfig

_SLEEP_S = 0.03  # of a layer, each way


class Clock(TrainerCallback):
    """`seconds`: from the end of a step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._end_s = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._end_s = time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now_s = time.monotonic()
        self.seconds.append(now_s - self._end_s)
        self._end_s = now_s


def sleeping(*_: Any) -> None:
    time.sleep(_SLEEP_S)


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(rows)
    return {"input_ids": ids, "labels": ids}


def train(model: Path, out: Path, name: str, cell: dict[str, Any]) -> list[float]:
    """`cell`: lengths, in the order of the samples; microbatches a step; optimizer; whether layers sleep."""
    set_seed(0)
    whole = AutoModelForCausalLM.from_pretrained(model, distributed_config=DistributedConfig(fsdp_size=2))
    if cell["sleeps"]:  # rank 0 in even layers, rank 1 in odd ones, forward and backward
        for layer in whole.model.layers[torch.distributed.get_rank() :: 2]:
            layer.register_forward_pre_hook(sleeping)
            layer.register_full_backward_pre_hook(sleeping)
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, whole.config.vocab_size, (n,), generator=generator).tolist() for n in cell["lengths"]]
    options = TrainingArguments(
        output_dir=str(out / name),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=cell["microbatches"],
        max_steps=cell["steps"],
        optim=cell["optim"],
        learning_rate=1e-3,
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    clock = Clock()
    trainer = Trainer(whole, options, train_dataset=samples, data_collator=collate, callbacks=[clock])
    trainer.train()
    if cell["saves"]:
        trainer.save_model()
    return clock.seconds


def main() -> None:
    out, cells = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    seconds = {name: train(Path(cell["model"]), out, name, cell) for name, cell in cells.items()}
    if torch.distributed.get_rank() == 0:
        (out / "seconds.json").write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
