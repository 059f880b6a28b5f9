"""Readers that share ports, event by event: how much longer a read takes when all ranks read at once."""

from __future__ import annotations

import random
from collections.abc import Sequence


def read_seconds(
    pair_gbs: Sequence[Sequence[float]],
    port_gbs: Sequence[float],
    shard_bytes: float,
    *,
    starts_s: Sequence[float],
    rounds: int = 1,
    latency_s: float = 0.0,
    rotated: bool = True,
) -> list[list[float]]:
    """Seconds that each reader's each round takes: [readers][rounds].

    Reader r starts at `starts_s[r]` and pulls `shard_bytes` from one owner after the other (rank + 1, rank + 2, ...;
    0, 1, 2, ... unless `rotated`), `rounds` times without pause. Owner o sends reader r at most `pair_gbs[o][r]`, and
    to n readers at once `port_gbs[o] / n` each. Each pull begins with `latency_s`. GB/s are 10^9 bytes per second.
    """
    ranks = len(port_gbs)
    order = [[(r + k) % ranks for k in range(1, ranks)] for r in range(ranks)]
    if not rotated:
        order = [sorted(owners) for owners in order]
    place = [0] * ranks  # pulls begun
    total = rounds * (ranks - 1)
    left = [float(shard_bytes)] * ranks
    opens_s = [start + latency_s for start in starts_s]  # when the pull's bytes begin to flow
    began_s = list(starts_s)
    took: list[list[float]] = [[] for _ in range(ranks)]
    now_s = 0.0
    while any(p < total for p in place):
        flowing = [r for r in range(ranks) if place[r] < total and opens_s[r] <= now_s]
        at = {r: order[r][place[r] % (ranks - 1)] for r in flowing}
        readers = [0] * ranks
        for owner in at.values():
            readers[owner] += 1
        rate = {r: 1e9 * min(pair_gbs[o][r], port_gbs[o] / readers[o]) for r, o in at.items()}
        next_s = min(
            [opens_s[r] for r in range(ranks) if place[r] < total and opens_s[r] > now_s]
            + [now_s + left[r] / rate[r] for r in flowing]
        )
        for r in flowing:
            left[r] -= rate[r] * (next_s - now_s)
            if left[r] <= 1e-9 * shard_bytes:
                place[r] += 1
                left[r] = float(shard_bytes)
                opens_s[r] = next_s + latency_s
                if place[r] % (ranks - 1) == 0:
                    took[r].append(next_s - began_s[r])
                    began_s[r] = next_s
        now_s = next_s
    return took


def slowdown(
    pair_gbs: Sequence[Sequence[float]], port_gbs: Sequence[float], *, rounds: int = 3, seed: int = 0
) -> float:
    """How many times longer a read takes, on average, when all ranks read all the time than alone; 1 or more.

    Readers start at random moments of the first read, as under ODC nobody keeps them in step.
    """
    ranks = len(port_gbs)
    if ranks < 3:
        return 1.0  # one reader a port
    quick = 1e9
    alone = [
        sum(quick / (1e9 * min(pair_gbs[o][r], port_gbs[o])) for o in range(ranks) if o != r) for r in range(ranks)
    ]
    generator = random.Random(seed)
    starts_s = [generator.random() * max(alone) for _ in range(ranks)]
    took = read_seconds(pair_gbs, port_gbs, quick, starts_s=starts_s, rounds=rounds)
    return max(1.0, sum(map(sum, took)) / (rounds * sum(alone)))
