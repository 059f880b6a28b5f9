"""What the measurements of shared prefixes train, count and compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from bench.harness import Measured, Work, compare, deal
from bench.suites import prefixes
from bench.suites.prefixes import GROUP, Trees
from bench.trees import SHARED, shared_tokens
from bench.variants import Ddp, Fsdp2Trees, Odc, OdcRepeated, OdcShared, OdcTrees
from odc_triton.balance.relatives import find_relatives
from tests.support import ranks

CONFIG = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS = (Odc, Ddp, Fsdp2Trees, OdcTrees, OdcRepeated, OdcShared)


def small(of: Trees, folder: Path) -> Work:
    return replace(of.work(folder), config=CONFIG)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LONG_CONFIG", CONFIG)


def test_trees_of_groups_and_of_turns(tmp_path: Path) -> None:
    for of, samples in (
        (Trees(prompt=40, completion=8, trees=3, rounds=2), GROUP),
        (Trees(prompt=64, completion=192, trees=2, rounds=1, are_turns=True), prefixes.TURNS),
    ):
        work = small(of, tmp_path)
        small(replace(of, rounds=0), tmp_path)  # other samples beside them, as a sweep's
        data = work.data()
        assert [len(drawn) for drawn in work.minibatches] == [2, *[of.trees * samples] * of.rounds]
        relatives = find_relatives([data[index] for index in work.minibatches[-1]])
        families = relatives.families()
        assert [len(family) for family in families] == [samples] * of.trees
        tokens = [sum(each.stop - each.start for each in family) for family in families]
        assert max(tokens) <= of.tokens() <= max(tokens) + samples, "one tree fits a pack"
        assert shared_tokens(relatives) == 2 * of.trees * (sorted(of.starts())[-2] - 1), "the longest is shared by none"
        for index, start in zip(work.minibatches[-1], of.starts() * of.trees, strict=True):
            labels = data[index]["labels"]
            assert (labels[:start] == -100).all()
            assert (labels[start:] >= 0).all()
            assert len(labels) == start + of.completion


class Drops(OdcRepeated):
    """Rank 1 leaves out a pack."""

    def gradients(self, packs: list, total_tokens: int) -> float:
        return super().gradients(packs[dist.get_rank() :], total_tokens)


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
    with pytest.raises(Exception, match="gradients are up to"):
        ranks.run(compared, 2, (Odc, Drops), work, (216, of.tokens()))
