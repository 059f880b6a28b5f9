"""The job of jobs/train/pairs.py: what Python calls, and what torchrun starts by `-m odc_triton.train.reward`."""

from __future__ import annotations

from ..jobs.train.pairs import main_reward as main
from ..jobs.train.pairs import train_pairs as train_reward
from ..jobs.train.pairs_options import RewardOptions as RewardOptions

__all__ = ["RewardOptions", "main", "train_reward"]

if __name__ == "__main__":
    main()
