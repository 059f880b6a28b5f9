"""The job of jobs/train/sft.py: what Python calls, and what torchrun starts by `-m odc_triton.train.sft`."""

from __future__ import annotations

from ..jobs.train.sft import main as main
from ..jobs.train.sft import train_sft as train_sft
from ..jobs.train.sft_options import SftOptions as SftOptions

if __name__ == "__main__":
    main()
