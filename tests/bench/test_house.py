"""How far features reach, what stands behind an entry, what a call passes: never more than bench/house.py's budgets."""

from __future__ import annotations

import pytest

from bench import house
from tests.support import ranks


@pytest.fixture(scope="module")
def as_it_is() -> house.House:
    return house.House()


@pytest.mark.parametrize("name", house.FEATURES)
def test_features_stay_at_home(as_it_is: house.House, name: str) -> None:
    _, knows = as_it_is.reach(house.FEATURES[name])
    assert len(knows) <= house.BUDGETS[name][0], knows


@pytest.mark.parametrize("entry", house.BEHIND)
def test_little_stands_behind_an_entry(as_it_is: house.House, entry: str) -> None:
    lines, files = as_it_is.behind(entry)
    assert len(files) > 5, "it is found"
    assert lines <= house.BEHIND[entry][0], files


def test_packs_are_trained_in_one_place(as_it_is: house.House) -> None:
    assert [place.partition(":")[0] for place in as_it_is.training_places()] == ["step.py"]


def test_homes_are_where_they_are_said_to_be(as_it_is: house.House) -> None:
    patterns = [pattern for feature in house.FEATURES.values() for pattern in feature.home]
    assert [each for each in patterns if not any(house.fnmatch(path, each) for path in as_it_is.sources)] == []


def _ways(rank: int, world: int) -> dict[str, list[str]]:
    return house.of_engine() | house.of_jobs()


def _require_short(ways: dict[str, list[str]]) -> None:
    longer = {name: files for name, files in ways.items() if len(files) > house.BUDGETS[name][0]}
    assert ways
    assert not longer


def test_a_minibatch_passes_few_files() -> None:
    _require_short(house.of_engine())


@pytest.mark.slow
def test_a_step_of_each_job_passes_few_files() -> None:
    (ways,) = ranks.run(_ways, 1)
    assert {*ways} | {*house.FEATURES} == {*house.BUDGETS}
    _require_short(ways)
