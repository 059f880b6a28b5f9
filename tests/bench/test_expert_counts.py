"""Counts of experts, by hand-made numbers; nothing is trained."""

from __future__ import annotations

from random import Random

import pytest
import torch

from bench.suites.expert_counts import Mixture, draw, fullest, loads, ours, parallel
from odc_triton.tools.simulate.hardware import Links

# One layer of 4 experts of 10 elements, of which a token chooses 2; 20 other elements.
_SIZES = {"layers": 1, "hidden": 5, "among": 4, "chosen": 2, "experts": 40, "others": 20}
TINY = Mixture(**_SIZES, other_flops=1, squared_flops=0, flops_s=1e-3, memory_s=1e30)
PAIR = Links(gpus=2, gbs=1.0, latency_s=0.0)


def test_hits_and_loads() -> None:
    pack = torch.tensor([[[0, 1], [0, 2]], [[3, 2], [2, 3]]])  # [layers, tokens, chosen]
    assert loads(pack, 4).tolist() == [[0.5, 0.25, 0.25, 0], [0, 0, 0.5, 0.5]]
    assert fullest(loads(pack, 4), 2) == pytest.approx((0.75 + 1.0) / 2)
    assert draw([pack, pack[:, :1]], 4, 2, Random(0)).tolist() == torch.cat([pack, pack], 1).tolist()


# Half of each tensor is remote. A pack reads 2 (20 + 40) bytes twice and adds 4 (20 + 40); kept experts cross once.
@pytest.mark.parametrize(
    ("packs", "hit", "kept", "sent"),
    [(1, 1.0, (), 240), (3, 1.0, (), 720), (3, 0.5, (), 480), (3, 1.0, (1.0, 1.0), 360), (3, 1.0, (1.0, 0.0), 520)],
)
def test_bytes(packs: int, hit: float, kept: tuple[float, ...], sent: float) -> None:
    assert ours(TINY, PAIR, [[8]] * packs, hit, *kept)[1] == pytest.approx(sent)


def test_expert_parallelism_waits_for_the_fullest() -> None:
    # Four exchanges of bf16 rows, of 9 tokens on average; 5 of 6 choices reach the other rank. Others cross once.
    seconds, sent = parallel(TINY, PAIR, [[[6]], [[12]]], 1, 1.5, overlap=False)
    assert sent == pytest.approx(1.5 * 4 * 2 * 5 * 9 * 5 / 6 + 6 * 20 / 2)
    assert seconds == pytest.approx((12 + 6 * 20 * 9 * 1.5) / 1e-3)
