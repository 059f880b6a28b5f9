"""Doors to the jobs, which are in jobs/train/."""
