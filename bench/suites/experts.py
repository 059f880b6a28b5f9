"""A layer of experts, 256 of which 8 are chosen, on two real CPU ranks: with the role `experts` and without it.

    python -m bench.suites.experts bench/results/experts.json [--quick]

`time`: a minibatch of packs of so many tokens, forward, backward and exit, without the role over with it; without it by
the fastest of transformers' implementations at that size. `hit`: the share of experts that a pack hits.
`bytes`: where shards are apart, what a rank reads of its peers and adds to them in a minibatch, over one copy of the
experts that it hits and does not own; and the most bytes of copies that it holds. `gathered`: counted, not measured.

Each way computes the same gradients, or it raises; then all are timed in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from odc_triton import fully_shard, minibatch, replace_layers
from odc_triton.engine.api import engine_of
from odc_triton.engine.kept import RowsOfOwners
from odc_triton.engine.transport import LockedTransport
from odc_triton.jobs.launcher.launch import launch
from tests.support import simulated  # noqa: F401  # the backend whose shards are apart

from .. import harness
from ..provenance import about, options_of, save_parts
from ..whole import whole

OURS, WITHOUT = "experts", ("grouped_mm", "batched_mm")  # "eager" makes a whole gradient for each expert: minutes
MOST_APART = 2e-5  # of gradients, in fp32


@dataclass(frozen=True, kw_only=True)
class Size:
    experts: int = 256
    top: int = 8
    hidden: int = 256
    width: int = 128
    tokens: tuple[int, ...] = (16, 64, 256, 4096)
    packs: int = 8
    rounds: int = 11
    most_batched: int = 64  # tokens: batched_mm copies a matrix for each pair

    def layer(self, implementation: str = "grouped_mm") -> nn.Module:
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            hidden_size=self.hidden,
            moe_intermediate_size=self.width,
            num_experts=self.experts,
            num_experts_per_tok=self.top,
        )
        config._experts_implementation = implementation
        layer = Qwen3MoeSparseMoeBlock(config)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=self.hidden**-0.5)
        return layer

    def hit(self, pack: Tensor) -> set[int]:
        """The experts that a pack hits."""
        return set(self.layer().gate(pack[0])[2].unique().tolist())

    def pack(self, tokens: int, seed: int) -> Tensor:
        return torch.randn(1, tokens, self.hidden, generator=torch.Generator().manual_seed(seed), requires_grad=True)


QUICK = Size(experts=16, top=2, hidden=32, width=16, tokens=(4, 16), packs=2, rounds=2)


def sharded(size: Size, way: str, **how: Any) -> nn.Module:
    layer = size.layer("grouped_mm" if way == OURS else way)
    if way == OURS:
        replace_layers(layer, roles=["experts"], choice=how.pop("choice", "auto"), verbose=False)
    return fully_shard(layer, **how)


def step(layer: nn.Module, packs: list[Tensor]) -> float:
    """Seconds of a minibatch."""
    began = time.perf_counter()
    with minibatch(layer, tokens=sum(pack.shape[1] for pack in packs)) as mb:
        for pack in packs:
            (layer(pack).square().sum() / mb.tokens).backward()
    return time.perf_counter() - began


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad) for name, p in layer.named_parameters() if p.grad is not None}


def refuse_other_gradients(layers: dict[str, nn.Module], packs: list[Tensor]) -> None:
    found = {}
    for way, layer in layers.items():
        step(layer, packs)
        found[way] = gradients(layer)
    for way, theirs in found.items():
        for name, gradient in theirs.items():
            apart = float((gradient - found[OURS][name]).norm() / found[OURS][name].norm())
            if apart > MOST_APART:
                raise RuntimeError(f"{way}: the gradient of {name} is {apart:.1e} apart from ours")


def times(size: Size) -> list[dict[str, Any]]:
    rank, _ = harness.open_job()
    layers, rows = {way: sharded(size, way) for way in (OURS, *WITHOUT)}, []
    for tokens in size.tokens:
        ways = [way for way in layers if way != "batched_mm" or tokens <= size.most_batched]
        packs = [size.pack(tokens, 100 * rank + seed) for seed in range(size.packs)]
        refuse_other_gradients({way: layers[way] for way in ways}, packs)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(size.rounds if tokens < 1024 else min(size.rounds, 5)):
            for way in harness.in_turn(ways, number):
                seconds[way].append(max(harness.gather(step(layers[way], packs))))
        best = min(ways[1:], key=lambda way: statistics.median(seconds[way]))
        rows.append(
            {
                "tokens": tokens,
                "hit": len(size.hit(packs[0])) / size.experts,
                "seconds": {way: statistics.median(each) for way, each in seconds.items()},
                "best_without": best,
                **harness.median_ratio(seconds[best], seconds[OURS]),
            }
        )
    dist.destroy_process_group()
    return rows


def counted(size: Size, cache_bytes: int) -> list[dict[str, Any]]:
    """By a rank that copies: bytes of one minibatch, of each number of tokens."""
    rank, world = harness.open_job()
    how = {"backend": "cpu-sharded", "choice": "experts=staged", "expert_cache_bytes": cache_bytes}
    layer, rows = sharded(size, OURS, **how), []
    rows_here = [each.rows for each in engine_of(layer).parameters if each.rows is not None]
    owned = range(rank * -(-size.experts // world), (rank + 1) * -(-size.experts // world))
    expert = 3 * size.hidden * size.width * 4
    for tokens in size.tokens:
        packs = [size.pack(tokens, 100 * rank + seed) for seed in range(size.packs)]
        moved = {"read": 0, "added": 0}

        def counting(own: Callable[..., Any], key: str, moved: dict[str, int] = moved) -> Callable[..., Any]:
            def count(this: Any, *given: Any) -> Any:
                if key == "read":
                    moved[key] += given[1].nbytes
                else:
                    moved[key] += sum(rows.nbytes for owner, rows in given[0].items() if owner != rank)
                return own(this, *given)

            return count

        with (
            mock.patch.object(RowsOfOwners, "_copy", counting(RowsOfOwners._copy, "read")),
            mock.patch.object(LockedTransport, "_add", counting(LockedTransport._add, "added")),
        ):
            step(layer, packs)
        hit = set().union(*map(size.hit, packs)) - set(owned)
        slots = {id(place): place for each in rows_here for pair in each.slots._places.values() for place in pair}
        rows.append(
            {
                "tokens": tokens,
                "hit": len(hit),
                "read": moved["read"] / (len(hit) * expert),
                "added": moved["added"] / (len(hit) * expert),
                "gathered_read": 2 * size.packs * size.experts * (world - 1) / world / len(hit),
                "gathered_added": size.packs * size.experts * (world - 1) / world / len(hit),
                "slots_in_experts": sum(place.nbytes for place in slots.values()) / expert,
                "kept_bytes": sum(each._copies.nbytes + each._sums.nbytes for each in rows_here),
            }
        )
    dist.destroy_process_group()
    return rows


def main() -> int:
    options = options_of(__doc__, out="out", quick=False)
    size = QUICK if options.quick else Size()
    harness.single_thread_environment()
    rows = launch(partial(times, size), ranks=2)[0]
    counts = {
        name: launch(partial(counted, size, cache), ranks=2)[0] for name, cache in (("cached", 2**40), ("slots", 0))
    }
    for row in rows:
        print({key: value if isinstance(value, (dict, str)) else round(value, 3) for key, value in row.items()})
    for name, each in counts.items():
        print(name, *each, sep="\n")
    save_parts(options.out, **about(), size=asdict(size), time=rows, bytes=counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
