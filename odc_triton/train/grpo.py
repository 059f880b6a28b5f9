"""The job of jobs/train/grpo.py: what Python calls, and what torchrun starts by `-m odc_triton.train.grpo`."""

from __future__ import annotations

from ..jobs.train.grpo import main as main
from ..jobs.train.grpo import train_grpo as train_grpo
from ..jobs.train.grpo_options import GrpoOptions as GrpoOptions

if __name__ == "__main__":
    main()
