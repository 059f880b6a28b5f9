"""Benchmarks: baselines, the harness that runs them side by side, and the demo. Not part of the package."""
