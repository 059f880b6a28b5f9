"""Each pair of features trains together as plain torch does, or is refused: docs/composes.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import ranks
from tests.support.composed import SAVED, Trained, on_ranks, samples_of, write
from tests.support.composed_plain import ARITHMETIC, by_plain_torch
from tests.support.table_composes import CAP, COMPOSES, PAIRS, REFUSED, SPLIT_CAP, Pair

WORLDS = {True: 4, False: 2}  # with replicas, and without


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("composes") / "case")


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, folder: Path) -> dict[Pair, list[Trained | str]]:
    """Of all ranks, for the pairs whose tests were selected: a launch runs all pairs of as many ranks."""
    chosen = {item.callspec.id for item in request.session.items if getattr(item, "originalname", "") == "test_pair"}
    found: dict[Pair, list[Trained | str]] = {}
    for replicas, world in WORLDS.items():
        pairs = [pair for pair in PAIRS if ("replicas" in pair) == replicas and " + ".join(pair) in chosen]
        if pairs:
            given = ranks.run(on_ranks, world, folder, pairs, folder / f"out-{world}", timeout_s=1700)
            found |= {pair: [each[pair] for each in given] for pair in pairs}
    return found


def distance(got: Trained, want: Trained) -> float:
    return float((got.moved() - want.moved()).norm() / want.moved().norm())


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the first one waits for the ranks, which run all pairs
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, id=" + ".join(pair), marks=COMPOSES.mark(*pair)) for pair in PAIRS]
)
def test_pair(outcomes: dict[Pair, list[Trained | str]], folder: Path, pair: Pair) -> None:
    found = outcomes[pair]
    if pair in REFUSED:
        for said in found:
            assert isinstance(said, str), "it is not refused"
            assert REFUSED[pair][0] in said
        return
    for got in found:
        assert isinstance(got, Trained), got
        assert set(pair) <= got.seen
        assert got.losses == found[0].losses
        assert got.norms == pytest.approx(found[0].norms, rel=1e-6)  # summed over the ranks by each of them
        assert all(torch.equal(got.end[name], whole) for name, whole in found[0].end.items())
        assert got.middle.keys() == got.saved.keys() or "background checkpoints" not in pair
        assert all(torch.equal(got.middle[name], whole) for name, whole in got.saved.items())
    got = found[0]
    features = tuple(feature for feature in pair if feature in ARITHMETIC)
    want = by_plain_torch(folder, features, got.start)
    # Sums in another order: of fp32; of bf16; and Newton-Schulz in bf16 makes of the last bits 1e-3 of an update, AdamW
    # whole updates of the small gradients of decays.
    bf16, most = "bf16" in pair, 1e-2 if "Muon" in pair else 5e-4 if "hybrid" in pair else 2e-5
    assert got.losses == pytest.approx(want.losses, rel=1e-3 if bf16 else 1e-5)
    assert got.norms == pytest.approx(want.norms, rel=1e-2 if bf16 else 1e-4)
    if not bf16:
        assert distance(got, want) <= most
        return
    fp32 = by_plain_torch(folder, tuple(feature for feature in features if feature != "bf16"), got.start)
    assert 0.7 * distance(want, fp32) <= distance(got, fp32) <= 1.3 * distance(want, fp32)
    assert distance(got, want) <= distance(want, fp32)


def test_samples_are_packed_and_have_to_be_split(folder: Path) -> None:
    lengths = samples_of(folder).lengths
    assert 2 * SPLIT_CAP >= lengths.max() > SPLIT_CAP  # two ranks can hold each, and one can't hold all
    assert 2 * lengths.max() <= CAP
    assert SAVED > 1
