"""`python -m odc_triton.train.sft`: the job of jobs/train/sft.py, as torchrun starts it."""

from __future__ import annotations

from ..jobs.train.sft import main

if __name__ == "__main__":
    main()
