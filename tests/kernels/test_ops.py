"""The kernels without the engine: the example, and what `PeerShards.symmetric` makes and refuses."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import place  # isort: skip

from odc_kernels import peers
from odc_kernels.peers import PeerShards
from tests.support import ranks, symmetric_memory
from tests.support.deadlines import LONG_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "kernels_alone.py"
SHOWN = 7  # comparisons that the example prints


def _run(rank: int, world: int, token: str) -> str:
    symmetric_memory.install(rank, world, token)
    dist.init_process_group = lambda backend: None  # the group is there
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


@pytest.mark.skipif(not place.INTERPRETED, reason="has a GPU: see the test below")
def test_the_example() -> None:
    printed = ranks.run(_run, 3, uuid.uuid4().hex)  # 17, 17 and 16 of 50 rows
    assert printed[0].count("as in plain torch") == SHOWN


@pytest.mark.gpu
@pytest.mark.skipif(place.INTERPRETED, reason="needs a CUDA device")
def test_the_example_on_a_gpu() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("as in plain torch") == SHOWN


def _symmetric(rank: int, world: int, token: str) -> dict[str, Any]:
    """What `symmetric` makes of 5 rows on 3 ranks, of which two share a GPU, and the words of its refusals."""
    import torch.distributed._symmetric_memory as torchs

    symmetric_memory.install(rank, world, token)
    peers._gpu_of = lambda tensor: f"GPU-{rank // 2}"
    mine = torchs.empty(2, 4, dtype=torch.float32, device=torch.device("cpu")).fill_(rank)
    made = PeerShards.symmetric(mine, rows=5)
    dist.barrier()
    found = {"rows": [shard[:, 0].tolist() for shard in made.shards], "far": made.far, "rank": made.rank}
    refused = {
        "shape": (mine[:1] if rank == 2 else mine, {}),
        "dtype": (mine.view(torch.int32) if rank == 1 else mine, {}),
        "strides": (mine.view(4, 2).t(), {}),
        "rows refused": (mine, {"rows": 7}),
        "plain": (torch.zeros(2, 4), {}),
    }
    for name, (tensor, given) in refused.items():
        with pytest.raises(ValueError) as error:
            PeerShards.symmetric(tensor, **given)
        found[name] = str(error.value)
    pair = dist.new_group([0, 1])
    if rank == 2:
        with pytest.raises(ValueError, match="this rank is not in the group"):
            PeerShards.symmetric(mine, pair)
    dist.barrier()
    return found


@pytest.mark.skipif(not place.INTERPRETED, reason="the stand-in is for the CPU")
def test_symmetric() -> None:
    for rank, found in enumerate(ranks.run(_symmetric, 3, uuid.uuid4().hex)):
        assert found["rows"] == [[0, 0], [1, 1], [2]]
        assert found["far"] == ([2] if rank < 2 else [0, 1])
        assert found["rank"] == rank
        assert "rank 2 of the group gave {'shape': (1, 4)" in found["shape"]
        assert "rank 1 of the group gave" in found["dtype"]
        assert "torch.int32" in found["dtype"]
        assert "it must be contiguous" in found["strides"]
        assert "for 7 rows on 3 ranks allocate 3 on each" in found["rows refused"]
        assert "not in symmetric memory" in found["plain"]
