"""What becomes of a drawn minibatch, as text: every rank's packs, the plan and its estimate, or the error.

python -m tests.balance.plan_outcomes 17        # prints the outcomes of group 17, to compare two checkouts
python -m tests.balance.plan_outcomes --record  # writes recorded_plans.json: after an intended change only
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from odc_triton.balance import CostModel, MinibatchSampler, assign, find_relatives
from odc_triton.plan.entries import Entry, Segment
from odc_triton.plan.order import Mix
from odc_triton.plan.plan import Plan
from odc_triton.plan.planner import Planner
from odc_triton.plan.queue import OwnCounter, QueuedPacks
from odc_triton.plan.samples import Limits, Samples
from odc_triton.plan.shared import shared_plan
from odc_triton.plan.split import split_plan
from tests.balance.drawn_minibatches import GROUP, GROUPS, Case, draws

RECORDED = Path(__file__).with_name("recorded_plans.json")


def outcome(case: Case) -> str:
    lines = [f"case {case.number}"]
    for part in (_epochs,) if "options" in case.given else (_planned, _assigned):
        try:
            lines.extend(part(case.given))
        except Exception as error:
            lines.append(f"{type(error).__name__}: {error}")
    return "\n".join(lines)


def _planned(given: Mapping[str, Any]) -> Iterator[str]:
    """By the planners' functions."""
    cost, extra, names = CostModel(**given["cost"]), given["extra"], given["names"]
    limits = {"ranks": given["ranks"], "token_cap": given["token_cap"]}
    over = {"split_tokens": given["tokens"], "replicas": given["replicas"]}
    if given["planner"] == "relatives":
        relatives = find_relatives(given["samples"]).among(names)
        yield f"relatives {relatives.digest()} floors {relatives.floors} families {relatives.family_numbers(most=8)}"
        within = Limits(**limits, **over)
        tokens = within.checked(given["lengths"])
        samples = Samples.of(tokens, cost, names=names, extra=extra, prefixes=relatives)
        shared = shared_plan(samples, within, required=False)
        yield f"estimate {float.hex(shared.estimate)} {_plan(shared)}"
        yield from map(_packs, map(shared.packs, range(given["ranks"])))
    elif given["planner"] == "split" or given["tokens"]:
        for ride in (True, False):
            within = Limits(**limits, **over)
            columns = {"names": names, "extra": extra, "earliest_cuts": given["floors"]}
            tokens = replace(within, split_tokens=within.split_tokens or 1).checked(given["lengths"])
            samples = Samples.of(tokens, cost, **columns)
            split = split_plan(samples, within, ride=ride)
            yield f"estimate {float.hex(split.estimate)} waves {len(split.ready[0])} {float.hex(split.ready_cost)}"
            yield f"costs {' '.join(map(float.hex, samples.prices))} {_plan(split)}"
            yield from map(_packs, map(split.packs, range(given["ranks"])))
    elif given["planner"] == "strategies":
        yield from map(_packs, assign(given["lengths"], **limits, cost=cost, extra=extra, balance=given["balance"]))


def _assigned(given: Mapping[str, Any]) -> Iterator[str]:
    """By the `Planner`, of every rank."""
    relatives = given["samples"] and find_relatives(given["samples"]).among(given["names"])
    floors = given["floors"] if given["tokens"] else None  # else it does not matter where a sample may be cut
    columns = {"extra": given["extra"], "earliest_cuts": relatives.floors if relatives else floors}
    for field, values in columns.items():
        by_name = values and defaultdict(int, zip(given["names"], values, strict=False))
        columns[field] = values and [by_name[name] for name in given["names"]]
    if (ranks := given["ranks"]) < 1:
        return
    replicas = given["replicas"] if given["tokens"] or relatives else 1
    options = {"token_cap": given["token_cap"], "shared_tokens": given["shared_tokens"], "replicas": replicas}
    limits = Limits(ranks=ranks, split_tokens=given["tokens"], **options)
    planner = {"limits": limits, "balance": given["balance"], "counter": OwnCounter()}
    planners = [Planner(**planner) for _ in range(ranks)]
    cost = CostModel(**given["cost"])
    # Relatives that no rank may read, over the cap: refused when it was recorded, split since then.
    within = replace(limits, split_tokens=0) if relatives and not limits.readable else limits
    tokens = within.checked(given["lengths"]) if given["lengths"] else []
    samples = Samples.of(tokens, cost, names=given["names"], prefixes=relatives or None, **columns)
    yield from _taken([each.packs(samples, rank) for rank, each in enumerate(planners)])


def _epochs(given: Mapping[str, Any]) -> Iterator[str]:
    """By the `MinibatchSampler`: some minibatches, then, by another with its state, the rest and the next epoch."""
    options, state = {**given["options"], "counter": OwnCounter()}, None
    options["relatives"] = given["samples"] and find_relatives(given["samples"])
    options |= {"mix": given["mix"] and Mix(**given["mix"]), "cost": given["cost"] and CostModel(**given["cost"])}
    for stop in (given["stop"], None, None):
        samplers = [MinibatchSampler(given["lengths"], rank=rank, **options) for rank in given["asked"]]
        for sampler in samplers:
            sampler.load_state_dict((state or sampler.state_dict()) | given["state"])
        yield f"split {samplers[0].split_tokens:d} minibatches {len(samplers[0])}"
        for number, of_ranks in enumerate(zip(*samplers, strict=True)):
            yield f"samples {of_ranks[0].samples} checksum {of_ranks[0].checksum}"
            yield from _taken(of_ranks)
            if number == stop:
                break
        state = samplers[0].state_dict()
        yield f"{sorted(state.items())} {sorted(samplers[0].state_dict(minibatches_done=7).items())}"


def _taken(of_ranks: Sequence[Any]) -> Iterator[str]:
    """The ranks' packs and their plan; of a queue the packs that they take in turn."""
    yield from {_plan(each.plan): None for each in of_ranks}  # one for all
    if any(isinstance(each, QueuedPacks) for each in of_ranks):
        of_ranks = [[*filter(None, packs)] for packs in zip(*zip_longest(*of_ranks), strict=True)]
    yield from map(_packs, of_ranks)


def _plan(whole: Plan) -> str:
    plan = whole.split
    return f"plan {plan.digest} of {plan.waves} waves, read {plan.tokens}" if plan else "no plan"


def _packs(packs: Sequence[Sequence[Entry]]) -> str:
    def told(entry: Entry) -> str:
        if not isinstance(entry, Segment):
            return str(entry)
        return f"{entry.sample}[{entry.start}:{entry.stop}]" + f"<{entry.parent}" * (entry.parent is not None)

    return f"packs {' | '.join(' '.join(map(told, entries)) for entries in packs)}"


def digest_of(group: int) -> str:
    return hashlib.sha256("\n".join(map(outcome, draws(GROUP, group * GROUP))).encode()).hexdigest()[:16]


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        RECORDED.write_text(json.dumps({name: digest_of(at) for name, at in GROUPS.items()}, indent=1) + "\n")
    else:
        print(*map(outcome, draws(GROUP, int(sys.argv[1]) * GROUP)), sep="\n")
