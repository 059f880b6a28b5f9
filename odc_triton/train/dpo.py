"""The job of jobs/train/pairs.py: what Python calls, and what torchrun starts by `-m odc_triton.train.dpo`."""

from __future__ import annotations

from ..jobs.train.pairs import main_dpo as main
from ..jobs.train.pairs import train_pairs as train_dpo
from ..jobs.train.pairs_options import DpoOptions as DpoOptions

__all__ = ["DpoOptions", "main", "train_dpo"]

if __name__ == "__main__":
    main()
