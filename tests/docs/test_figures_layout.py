"""The figures of rows, tiles and pieces show the layout, the kernels' own order and the planner's plan."""

from __future__ import annotations

import json
import re
from functools import partial
from types import ModuleType

import pytest

from tests.support import place  # isort: skip

from docs.figures import adding, reading, record_kernels, tiles, waves
from odc_triton.balance import line, split
from odc_triton.comm import layout
from tests.docs.svg import found, numbers

interpreted = pytest.mark.skipif(not place.INTERPRETED, reason="kernels are recorded in the interpreter")


def _found(figure: ModuleType, kind: str, tag: str = "rect") -> list[dict]:
    """The elements of a class in the figure as it is drawn now."""
    return found(figure.draw(figure.data()), tag, kind)


def _ranks(elements: list[dict[str, str]]) -> list[int]:
    return [int(re.search(r"rank(\d)", each["class"])[1]) for each in elements]


@interpreted
def test_kernels_do_what_was_recorded() -> None:
    committed = json.loads(record_kernels.PATH.read_text())
    assert committed | record_kernels.record() == committed, f"run {committed['command']}, then python -m docs.figures"


@pytest.mark.parametrize("figure", [reading, adding], ids=lambda figure: figure.__name__)
def test_heights_are_the_rows_that_ranks_own(figure: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert numbers(_found(figure, "owned"), "height") == [48, 48, 48, 16]
    # The rows that were accessed are those of the layout.
    assert sorted(numbers(_found(figure, "part"), "height")) == [16, 48, 48, 48]
    monkeypatch.setattr(layout, "rows_per_rank", lambda rows, world: 4)
    assert numbers(_found(figure, "owned"), "height") == [64, 64, 32, 0]


@pytest.mark.parametrize("figure", [reading, adding], ids=lambda figure: figure.__name__)
def test_arrows_are_in_the_kernels_order(figure: ModuleType) -> None:
    assert _ranks(_found(figure, "arrow", "polyline")) == [2, 3, 0, 1]


def test_each_owner_gets_one_addition_of_each_rank() -> None:
    chips = _ranks(_found(adding, "turn"))
    assert [sorted(chips[4 * owner : 4 * owner + 4]) for owner in range(4)] == [[0, 1, 2, 3]] * 4
    assert json.loads(record_kernels.PATH.read_text())["sums"] == [[4.0]] * 4


def test_a_tile_reads_the_owner_of_its_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _found(tiles, "tile")
    assert _ranks(shown) == [1] * 6 + [2] * 6 + [3] * 6 + [0] * 6  # in launch order, own rows first
    assert len({(each["x"], each["y"]) for each in shown}) == 24
    for rank, owned in enumerate(_found(tiles, "owned")):
        left, right = float(owned["x"]) - 2, float(owned["x"]) + float(owned["width"]) + 2
        of_rank = [each for each, owner in zip(shown, _ranks(shown), strict=True) if owner == rank]
        assert all(left <= float(each["x"]) and float(each["x"]) + float(each["width"]) <= right for each in of_rank)
        assert len(of_rank) == 6
    monkeypatch.setattr(layout, "rows_per_rank", lambda rows, world: 40)
    assert numbers(_found(tiles, "owned"), "width") == [116, 116, 116, 20]


def test_pieces_are_as_wide_as_they_have_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens() -> list[int]:
        return [box["tokens"] for column in waves.data()["columns"] for part in column for box in part]

    def widths() -> list[float]:
        return [width + 2 for width in numbers(_found(waves, "piece"), "width")]

    assert sum(tokens()) == sum(waves.LENGTHS)
    per_token = sum(widths()) / sum(tokens())
    before = tokens()
    assert widths() == pytest.approx([each * per_token for each in before], abs=0.01)
    cut = line._nearest_cut
    monkeypatch.setattr(line, "_nearest_cut", lambda at, *rest: cut(at - 900, *rest))
    assert tokens() != before
    per_token = sum(widths()) / sum(tokens())
    assert widths() == pytest.approx([each * per_token for each in tokens()], abs=0.01)


def test_a_piece_has_an_arrow_for_each_piece_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assign = partial(split.assign_split, ranks=waves.RANKS, token_cap=waves.CAP, tokens=sum(waves.LENGTHS))
    plan = assign(waves.LENGTHS, cost=waves.CostModel.paper_7b()).plan
    read = [each.holder.rank for at in plan.pieces for each in plan.reads(at.piece)]
    arrows = _ranks(_found(waves, "arrow", "polyline"))
    assert sorted(arrows) == sorted(read)
    assert (plan.waves, len(arrows)) == (2, 10)
    monkeypatch.setattr(waves, "CAP", 32_000)  # all in one wave
    assert waves.data()["waves"] == 1
