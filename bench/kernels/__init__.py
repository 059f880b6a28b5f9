"""The kernels alone: checked, timed against baselines, and their machine code inspected."""
