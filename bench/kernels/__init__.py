"""The kernels alone: checked and timed beside baselines, and their machine code read."""
