"""Six ways to train shared prefixes have the same gradient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.harness import Measured, Work, compare, deal
from bench.suites import prefixes
from bench.suites.prefixes import Trees
from bench.trees import SHARED
from bench.variants import Ddp, Fsdp2Trees, Odc, OdcRepeated, OdcShared, OdcTrees
from tests.support import ranks
from tests.support.families import SIZES

CONFIG = SIZES | {"max_position_embeddings": 256}
KINDS = (Odc, Ddp, Fsdp2Trees, OdcTrees, OdcRepeated, OdcShared)


def small(of: Trees, folder: Path) -> Work:
    return replace(of.work(folder), config=CONFIG)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LONG_CONFIG", CONFIG)


def compared(rank: int, world: int, kinds: tuple, work: Work, caps: tuple[int, ...]) -> list[Measured]:
    return compare(kinds, work, caps=caps, most_apart=prefixes.MOST_APART)


def test_all_ways_have_the_same_gradient(tmp_path: Path) -> None:
    of = Trees(prompt=200, completion=16, trees=1, rounds=1)
    work = small(of, tmp_path)
    caps = (216, 216, *[of.tokens()] * 4)
    dealt = deal(work, work.data(), work.minibatches[-1], SHARED, work.cost(), ranks=2)
    assert dealt[0].split is not None, "a rank reads the prompt of another"
    results = ranks.run(compared, 2, KINDS, work, caps)[0]
    assert [result.microbatches[1] for result in results] == [[4, 4], [4, 4], [1, 0], [1, 0], [1, 1], [1, 1]]
    assert 0 < max(result.apart for result in results) <= prefixes.MOST_APART
    losses = [result.losses[1] for result in results]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
