"""The `odc-triton` command."""

from .command import main as main
