"""The modules that torchrun starts; the jobs are in jobs/train/."""
