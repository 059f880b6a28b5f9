"""A program of FSDP2, and the same by `odc_triton.run`: `trainer.py` is the program."""
