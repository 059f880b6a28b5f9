"""What only a GPU can tell: `python -m bench.suites.gpu`, see docs/gpus.md."""
