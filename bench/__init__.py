"""Benchmarks: baselines, the harness that runs them side by side, and the demo.

Installed as `odc_bench`, as `kernels/` is as `odc_kernels`; in the repository also `bench`.
"""
