"""Plans of samples of given lengths, split or with shared prefixes whatever else would take less."""

from __future__ import annotations

from collections.abc import Sequence

from odc_triton.balance import CostModel
from odc_triton.plan.plan import Plan
from odc_triton.plan.planner import SHARED, make_plan
from odc_triton.plan.relatives import Relatives
from odc_triton.plan.samples import Limits, Samples
from odc_triton.plan.split import split_plan


def split(
    lengths: Sequence[int],
    *,
    cost: CostModel,
    tokens: int,
    names: Sequence[int] | None = None,
    ride: bool = True,
    extra: Sequence[float] | None = None,
    floors: Sequence[int] | None = None,
    **limits: int,
) -> Plan:
    within = Limits(split_tokens=tokens, **limits)
    checked = Limits(split_tokens=tokens or 1, **limits).checked(lengths)
    samples = Samples.of(checked, cost, names=names, extra=extra, earliest_cuts=floors)
    return split_plan(samples, within, ride=ride)


def shared(
    lengths: Sequence[int],
    relatives: Relatives,
    *,
    cost: CostModel,
    tokens: int = 0,
    extra: Sequence[float] | None = None,
    **limits: int,
) -> Plan:
    within = Limits(split_tokens=tokens, **limits)
    samples = Samples.of(within.checked(lengths), cost, extra=extra, prefixes=relatives)
    return make_plan(samples, within, SHARED)
