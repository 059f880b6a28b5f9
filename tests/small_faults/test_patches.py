"""The faults can be put into the code as it is now."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git applies them in a checkout only")
def test_each_applies() -> None:
    for patch in sorted(Path(__file__).parent.glob("*.patch")):
        done = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{patch.name}: {done.stderr}"
