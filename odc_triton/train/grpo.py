"""`python -m odc_triton.train.grpo`: the job of jobs/train/grpo.py, as torchrun starts it."""

from __future__ import annotations

from ..jobs.train.grpo import main

if __name__ == "__main__":
    main()
