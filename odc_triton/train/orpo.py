"""The job of jobs/train/pairs.py: what Python calls, and what torchrun starts by `-m odc_triton.train.orpo`."""

from __future__ import annotations

from ..jobs.train.pairs import main_orpo as main
from ..jobs.train.pairs import train_pairs as train_orpo
from ..jobs.train.pairs_options import OrpoOptions as OrpoOptions

__all__ = ["OrpoOptions", "main", "train_orpo"]

if __name__ == "__main__":
    main()
