"""What splitting takes and frees: the room that others read, what autograd saves, and a sequence over the token cap.

On the CPU suite's model and lengths. Saved bytes are those of one microbatch's forward, its largest: the storages that
autograd keeps for the backward, each counted once, without those in shared memory, where parameters and what other
ranks wrote are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from odc_triton.balance.collate import Pack, count_target_tokens
from odc_triton.comm.launch import launch
from odc_triton.engine.api import engine_of, minibatch
from odc_triton.hf import summed_loss
from odc_triton.sharding.footprint import memory_plan

from ..cut import cut
from ..harness import Work, build, deal, gather, open_job, train_minibatch
from ..variants import Odc, OdcSplit, Variant

RANKS = (2, 4, 8)
COLUMNS = ("ranks", "room's bytes", "of the plan's", "autograd saves unsplit", "split", "ratio", "twice the cap: loss")
SHARED_NAME = "/memfd:odc-heap"


def shared_ranges(maps: str) -> list[range]:
    """The addresses of the heaps that ranks share, of the text of /proc/self/maps."""
    lines = [line.split(maxsplit=5) for line in maps.splitlines()]
    bounds = [line[0].split("-") for line in lines if len(line) == 6 and line[5].startswith(SHARED_NAME)]
    return [range(int(first, 16), int(end, 16)) for first, end in bounds]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """What autograd saves within it. `storages`: bytes by address; none of shared memory."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self._shared = shared_ranges(Path("/proc/self/maps").read_text())
        super().__init__(self._count, lambda tensor: tensor)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not any(storage.data_ptr() in each for each in self._shared):
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor


def saved_bytes(variant: Variant, packs: Sequence[Pack], total: int) -> int:
    """The most that autograd saves for one of this rank's packs, on the rank for which it is most. Collective.

    `total`: targets of all ranks' packs.
    """
    most = 0
    with minibatch(variant.model, tokens=total if dist.get_rank() == 0 else 0, split=packs.split) as mb:
        for pack in packs:
            saved = SavedBytes()
            with saved:
                loss = summed_loss(variant.model, pack)
            most = max(most, sum(saved.storages.values()))
            (loss / mb.tokens).backward()
    return max(gather(most))


def measure(work: Work, over_cap: Work) -> dict:
    """On one rank; rank 0's is that of all. Collective. `work`: one minibatch; `over_cap`: one with a sample of twice
    the token cap.
    """
    open_job()
    data, cost, world = work.data(), work.cost(), dist.get_world_size()
    saved = {}
    for kind in (Odc, OdcSplit):
        variant = build(kind, work)
        dealt = deal(work, data, work.minibatches[0], kind.balance, cost)
        total = sum(count_target_tokens(packs) for packs in dealt)
        saved[kind] = saved_bytes(variant, dealt[dist.get_rank()], total)
    room = engine_of(variant.model).splits.room
    plan = memory_plan(work.build(), world, split_tokens=room.tokens)
    planned = plan.split_bytes * world
    trained = train_minibatch(build(OdcSplit, over_cap), over_cap, over_cap.data(), cost, 0, 0)
    dist.destroy_process_group()
    return {
        "ranks": world,
        "lengths": [int(data.lengths[index]) for index in work.minibatches[0]],
        "room": {
            "tokens_per_rank": room.tokens,
            "bytes": room.heap.size_bytes,
            "planned_bytes": planned,
            "ratio": room.heap.size_bytes / planned,
        },
        "saved_by_autograd": {
            "unsplit_bytes": saved[Odc],
            "split_bytes": saved[OdcSplit],
            "ratio": saved[OdcSplit] / saved[Odc],
        },
        "over_the_cap": {
            "token_cap": over_cap.token_cap,
            "tokens": int(max(over_cap.data().lengths)),
            "loss": trained.loss,
            "trains": math.isfinite(trained.loss),
        },
    }


def run(work: Work, ranks: int, folder: Path) -> dict:
    """On the minibatch of `work` that has its longest sample, which sets a run's peak. Writes into `folder`."""
    lengths = work.data().lengths
    longest = max(work.minibatches, key=lambda samples: max(map(int, lengths[samples])))
    cap = work.token_cap // 2
    text = work.data().tokens
    cut(text, [2 * cap, cap // 4]).save(folder / "over_cap.npz")
    over_cap = replace(work, dataset=str(folder / "over_cap.npz"), minibatches=[[0, 1]], token_cap=cap)
    return launch(measure, replace(work, minibatches=[longest]), over_cap, ranks=ranks)[0]


def cells_of(row: dict) -> list[object]:
    """A line of the table."""
    room, saved = row["room"], row["saved_by_autograd"]
    return [
        row["ranks"],
        room["bytes"],
        f"{room['ratio']:.4f}",
        saved["unsplit_bytes"],
        saved["split_bytes"],
        f"{saved['ratio']:.2f}",
        f"{row['over_the_cap']['loss']:.3f}",
    ]
