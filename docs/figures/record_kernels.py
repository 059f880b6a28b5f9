"""Runs three kernels in Triton's interpreter and notes which rows of which owner they read and add to, in their order.

`python -m docs.figures.record_kernels` writes recorded_kernels.json, which the figures reading, adding and tiles show.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import bench.kernels.problem  # noqa: F401  # isort: skip  # before any kernel: decides that they are interpreted

import numpy as np
import torch
from triton.runtime import interpreter

from odc_kernels.gather import gather
from odc_kernels.linear import linear
from odc_kernels.peers import ALL, PeerShards, shards_of
from odc_kernels.scatter import scatter
from odc_kernels.tiles import LinearTile

PATH = Path(__file__).with_name("recorded_kernels.json")
WORLD, SHAPE = 4, (10, 8)
WEIGHT, TOKENS, TILE = (128, 32), 48, LinearTile(t=16, n=16, k=16)
_ACCESSES = {"load": "create_masked_load", "add": "create_atomic_rmw", "store": "create_masked_store"}


def record() -> dict[str, Any]:
    """Of gather and scatter: by rank, [owner, first row, stop]. Of linear on rank 1: a tile is its program, the owner
    that it read, and [first, stop] of tokens and columns that it stored.
    """
    found: dict[str, Any] = {"world": WORLD, "shape": SHAPE, "gather": [], "scatter": []}
    sums = shards_of(torch.zeros(SHAPE), WORLD)
    for rank in range(WORLD):
        peers = PeerShards.of(shards_of(torch.randn(SHAPE), WORLD), shape=SHAPE, rank=rank, near=ALL)
        with _accesses("load", peers.shards) as reads:
            gather(peers=peers, out=torch.empty(SHAPE))
        peers = PeerShards.of(sums, shape=SHAPE, rank=rank, near=ALL)
        with _accesses("add", sums) as additions:
            scatter(gradient=torch.ones(SHAPE), peers=peers)
        for name, seen in (("gather", reads), ("scatter", additions)):
            each = peers.rows_per_owner
            found[name].append([(owner, owner * each + box[0], owner * each + box[1]) for _, owner, box in seen])
    found["sums"] = [shard.unique().tolist() for shard in sums]
    weight = PeerShards.of(shards_of(torch.randn(WEIGHT), WORLD), shape=WEIGHT, rank=1, near=ALL)
    out = torch.empty(TOKENS, WEIGHT[0])
    with _accesses("load", weight.shards) as reads, _accesses("store", [out]) as stores:
        linear(x=torch.randn(TOKENS, WEIGHT[1]), weight=weight, out=out, tile=TILE)
    owners = {program: owner for program, owner, _ in reads}
    tiles = [(program, owners[program], box[:2], box[2:]) for program, _, box in stores]
    found["linear"] = {"rank": 1, "rows": WEIGHT[0], "tokens": TOKENS, "tiles": tiles}
    return json.loads(json.dumps(found))


@contextmanager
def _accesses(kind: str, tensors: Sequence[torch.Tensor]) -> Iterator[list[tuple]]:
    """The accesses to `tensors`: (program, index of the tensor, [first row, stop, first column, stop])."""
    builder, name, seen = interpreter.interpreter_builder, _ACCESSES[kind], []
    original = getattr(builder, name)

    def noted(*given: Any) -> Any:
        pointers = given[1] if kind == "add" else given[0]
        mask = given[{"load": 1, "add": 3, "store": 2}[kind]].data
        for index, tensor in enumerate(tensors):
            at = pointers.data[mask].astype(np.int64) - tensor.data_ptr()
            at = at[(at >= 0) & (at < tensor.nbytes)] // tensor.element_size()
            if at.size:
                rows, columns = np.divmod(at, tensor.shape[1])
                box = [int(v) for v in (rows.min(), rows.max() + 1, columns.min(), columns.max() + 1)]
                seen.append((builder.grid_idx, index, box))
        return original(*given)

    with mock.patch.object(builder, name, noted):
        yield seen


if __name__ == "__main__":
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    made = {"command": "python -m docs.figures.record_kernels", "commit": commit.strip(), **record()}
    PATH.write_text(json.dumps(made) + "\n", encoding="utf-8")
