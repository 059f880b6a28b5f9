"""5,000 drawn minibatches and epochs give the packs, plans, estimates, checksums and errors that were recorded."""

import json

import pytest

from tests.balance.drawn_minibatches import GROUPS, KINDS
from tests.balance.plan_outcomes import RECORDED, digest_of

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name, group in GROUPS.items() if group >= 6]


@pytest.mark.parametrize("name", [*(name for name, group in GROUPS.items() if group < 6), *SLOW])
def test_a_group_of_50_has_the_recorded_outcomes(name: str) -> None:
    assert digest_of(GROUPS[name]) == json.loads(RECORDED.read_text())[name], (
        f"other outcomes in group {name}: compare what `python -m tests.balance.plan_outcomes {GROUPS[name]}` prints "
        "here and in a checkout of the last commit that passes"
    )


def test_every_kind_is_among_the_first_groups() -> None:
    assert {*KINDS[:6]} == {*KINDS}
