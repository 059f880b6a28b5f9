"""Runs a program whose FSDP2 models train by on-demand communication, without a change to it.

    torchrun --nproc-per-node 8 -m odc_triton.run train.py --its options
    accelerate launch --config_file fsdp2.yaml -m odc_triton.run train.py --its options
    accelerate launch --config_file fsdp2.yaml -m odc_triton.run -m its.module --its options

`odc-triton run` starts the ranks as well. When the program has ended, a line of rank 0 on stderr says what was
trained so.
"""

from __future__ import annotations

import argparse

from .jobs.launcher.program import add_arguments, run_program


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(prog="python -m odc_triton.run", description=(__doc__ or "").partition("\n")[0])
    add_arguments(parser)
    run_program(parser.parse_args())


if __name__ == "__main__":
    main()
