"""Lets a checkout run that was not installed, where nothing can be."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from ...provenance import ROOT


def make_importable(site: Path) -> None:
    """Finds the packages of this checkout under the names that an installation gives them, by links in `site`: in this
    process and in those that it starts.
    """
    site.mkdir(parents=True, exist_ok=True)
    for name, folder in (("odc_kernels", "kernels"), ("odc_bench", "bench"), ("odc_triton", "odc_triton")):
        with contextlib.suppress(FileExistsError):
            (site / name).symlink_to(ROOT / folder)
    sys.path[:0] = found = [str(site), str(ROOT)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*found, os.environ.get("PYTHONPATH", "")]))
