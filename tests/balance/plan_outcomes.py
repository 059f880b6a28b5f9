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
from itertools import zip_longest
from pathlib import Path
from typing import Any

from odc_triton.balance import CostModel, MinibatchSampler, assign, find_relatives
from odc_triton.balance.assigner import Assigner
from odc_triton.balance.pieces import Entry, Piece, SplitPlan
from odc_triton.balance.queue import OwnCounter, QueuedPacks
from odc_triton.balance.shared import assign_shared
from odc_triton.balance.split import assign_split
from odc_triton.data.order import Mix
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
    how = {"cost": CostModel(**given["cost"]), **{each: given[each] for each in ("ranks", "token_cap", "extra")}}
    over = {each: given[each] for each in ("tokens", "replicas", "names")}
    if given["planner"] == "relatives":
        relatives = find_relatives(given["samples"]).among(given["names"])
        yield f"relatives {relatives.digest()} floors {relatives.floors} families {relatives.family_numbers(most=8)}"
        shared = assign_shared(given["lengths"], relatives, **how, **over)
        yield f"estimate {float.hex(shared.estimate)} {_plan(shared.plan)}"
        yield from map(_packs, shared.packs)
    elif given["planner"] == "split" or given["tokens"]:
        for ride in (True, False):
            split = assign_split(given["lengths"], **how, **over, ride=ride, floors=given["floors"])
            yield f"estimate {float.hex(split.estimate)} waves {len(split.waves)} {float.hex(split.waves_cost)}"
            yield f"costs {' '.join(map(float.hex, split.costs))} {_plan(split.plan)}"
            yield from (_packs(split.packs(rank)) for rank in range(given["ranks"]))
    elif given["planner"] == "strategies":
        yield from map(_packs, assign(given["lengths"], **how, balance=given["balance"]))


def _assigned(given: Mapping[str, Any]) -> Iterator[str]:
    """By the `Assigner`, of every rank. It takes extra costs and floors by name."""
    relatives = given["samples"] and find_relatives(given["samples"]).among(given["names"])
    floors = relatives.floors if relatives else given["floors"]
    options = {each: given[each] for each in ("token_cap", "balance", "shared_tokens", "replicas")}
    for field, values in ("extra", given["extra"]), ("floors", floors):
        options[field] = values and defaultdict(int, zip(given["names"], values, strict=False))
    options |= {"cost": CostModel(**given["cost"]), "split_tokens": given["tokens"], "counter": OwnCounter()}
    assigners = [Assigner(rank=rank, world=given["ranks"], **options) for rank in range(given["ranks"])]
    yield from _taken([each.own(given["lengths"], given["names"], relatives) for each in assigners])


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
    yield from {_plan(each.split): None for each in of_ranks}  # one for all
    if any(isinstance(each, QueuedPacks) for each in of_ranks):
        of_ranks = [[*filter(None, packs)] for packs in zip(*zip_longest(*of_ranks), strict=True)]
    yield from map(_packs, of_ranks)


def _plan(plan: SplitPlan | None) -> str:
    return f"plan {plan.digest} of {plan.waves} waves, read {plan.tokens}" if plan else "no plan"


def _packs(packs: Sequence[Sequence[Entry]]) -> str:
    def told(entry: Entry) -> str:
        if not isinstance(entry, Piece):
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
