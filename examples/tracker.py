"""`odc-triton train sft` with a tracker: the same options, and every step's metrics in a CSV file and in TensorBoard.

torchrun --nproc-per-node 2 examples/tracker.py --data train.jsonl --model FOLDER --out out/run

Any tracker works the same way: `on_metrics` is called on rank 0 after each step with a dict of numbers.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
from pathlib import Path

import torch.distributed as dist

from odc_triton.base.options import add_arguments, read_options
from odc_triton.train.sft import train_sft
from odc_triton.train.sft_options import SftOptions


class Tracker:
    """Writes `metrics.csv`, and event files if the package tensorboard is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._rows, self._events = folder, None, None

    def __call__(self, metrics: dict[str, float]) -> None:
        if self._rows is None:  # called on rank 0 only, and only then is there something to write
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = open(self.folder / "metrics.csv", "w", newline="", encoding="utf-8")  # noqa: SIM115
            self._rows = csv.DictWriter(self._file, fieldnames=list(metrics))
            self._rows.writeheader()
            if importlib.util.find_spec("tensorboard") is not None:
                from torch.utils.tensorboard import SummaryWriter

                self._events = SummaryWriter(self.folder)
        self._rows.writerow(metrics)
        self._file.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, metrics["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tracker", type=Path, default=Path("out/tracker"), help="folder to write to")
    add_arguments(parser, SftOptions)
    chosen = parser.parse_args()
    try:
        train_sft(read_options(SftOptions, vars(chosen)), on_metrics=Tracker(chosen.tracker))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
