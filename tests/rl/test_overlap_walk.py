"""All interleavings of small overlapped rollouts: ranks agree on who computes what, each completion is computed once,
and no rank waits forever; and a fault as soon as a rule is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest

from tests.support import slow
from tests.support.overlapped import SIGNAL, Fault, Plan, Reader

OVER = {"out", "crashed", "lost", "dead"}  # a rank's phases at the exit barrier, or gone


class Write(NamedTuple):
    """A message in the log, of a rank's thread, -1: its main one. `is_set`: has its text."""

    rank: int
    thread: int
    text: str
    is_set: bool = False


class Rank(NamedTuple):
    phase: str
    known: int  # the number of what it knows
    threads: tuple[tuple[str, tuple[int, ...]], ...]  # phase, prompts
    packs: int = 0
    is_stopped: bool = False


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    faults: tuple[str, ...]  # to come
    log: tuple[Write, ...] = ()  # from the first hole on
    taken: int = 0

    def changed(self, at: int, **changes: Any) -> State:
        return self._replace(ranks=(*self.ranks[:at], self.ranks[at]._replace(**changes), *self.ranks[at + 1 :]))

    def in_thread(self, at: int, thread: int, phase: str, places: tuple[int, ...] = ()) -> State:
        threads = self.ranks[at].threads
        return self.changed(at, threads=(*threads[:thread], (phase, places), *threads[thread + 1 :]))


class Walk:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.readers: list[Reader] = []
        self.numbers: dict[tuple, int] = {}
        self.step = cache(lambda known, text: self.number(self.readers[known].after(text)))
        self.looks = cache(lambda known, *given: self.readers[known].looks(*given))

    def number(self, reader: Reader) -> int:
        if (state := reader.state) not in self.numbers:
            reader.check()
            self.numbers[state] = len(self.readers)
            self.readers.append(reader)
        return self.numbers[state]

    def run(self) -> int:
        """How many states there are. Raises Fault."""
        rank = Rank("free", self.number(Reader(self.plan)), (("idle", ()),) * (self.plan.threads or 1))
        todo = [State((rank,) * self.plan.ranks, self.plan.faults)]
        seen = {*todo}
        while todo:
            state = todo.pop()
            after = [*self.after(state)]
            if not after:
                self.check_end(state)
            for each in (*after, *self.after_faults(state)):
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
        return len(seen)

    def after(self, state: State) -> Iterator[State]:
        writing = {(each.rank, each.thread) for each in state.log if not each.is_set}
        for at, rank in enumerate(state.ranks):
            if rank.phase in ("dead", "lost"):
                continue
            for place, write in enumerate(state.log):
                if write.rank == at and not write.is_set:
                    yield self.has_set(state, place)
            if (at, -1) not in writing:
                yield from self.after_main(state, at, rank)
            for thread, (phase, places) in enumerate(rank.threads):
                if (at, thread) not in writing:
                    yield from self.after_thread(state, at, thread, phase, places)

    def after_main(self, state: State, at: int, rank: Rank) -> Iterator[State]:
        if rank.phase == "free" and (self.plan.threads or self.is_done(state, at, 0)):  # or computes its pack
            now, again = state.changed(at, phase="wait"), not rank.packs or self.plan.without != "free again"
            yield self.writes(now, at, -1, {"free": at}) if again else now
        elif rank.phase == "stop":
            yield self.writes(state.changed(at, phase="wait"), at, -1, {"ended": {"rank": at, "stop": SIGNAL}})
        elif rank.phase == "wait":
            is_behind = self.plan.without != "waits for holes" and any(each.rank == at for each in state.log)
            known, has_pack, written, missing = self.looks(rank.known, at, rank.packs, rank.is_stopped, is_behind)
            if written:
                yield state.changed(at, phase="stop")
            elif known:
                yield state.changed(at, phase="free", packs=rank.packs + 1) if has_pack else self.ends(state, at)
            elif any(state.ranks[other].phase in ("dead", "lost") for other in missing):
                yield state.changed(at, phase="lost")
            else:
                self.check_missing(state, at, missing, is_behind)

    def is_done(self, state: State, at: int, thread: int) -> bool:
        """Nothing is left to take."""
        rank, (phase, _) = state.ranks[at], state.ranks[at].threads[thread]
        are_taken = state.taken * self.plan.together >= len(self.plan.groups)
        return phase == "done" or (phase == "idle" and (are_taken or rank.is_stopped or rank.phase in OVER))

    def after_thread(self, state: State, at: int, thread: int, phase: str, places: tuple[int, ...]) -> Iterator[State]:
        if phase == "idle" and not self.is_done(state, at, thread):
            start = state.taken * self.plan.together
            taken = tuple(range(len(self.plan.groups))[start : start + self.plan.together])
            yield state._replace(taken=state.taken + 1).in_thread(at, thread, "took", taken)
        elif phase == "took":
            yield self.writes(state.in_thread(at, thread, "busy", places), at, thread, {"took": [*places], "rank": at})
        elif phase in ("busy", "came"):
            if phase == "busy" and (state.ranks[at].is_stopped or state.ranks[at].phase in OVER):
                yield state.in_thread(at, thread, "done", places)
            now = state.in_thread(at, thread, *(("came", places[1:]) if places[1:] else ("idle",)))
            yield self.writes(now, at, thread, {"came": {"slot": places[0]}, "at_s": 0})

    def after_faults(self, state: State) -> Iterator[State]:
        """They come or not."""
        for number, fault in enumerate(state.faults):
            less = state._replace(faults=state.faults[:number] + state.faults[number + 1 :])
            for at, rank in enumerate(state.ranks):
                if rank.phase in OVER:
                    continue
                if fault == "stop":
                    yield less.changed(at, is_stopped=True)
                elif fault == "dies":
                    yield less.changed(at, phase="dead")
                elif fault == "crash" and rank.phase == "free" and rank.packs:
                    now = less.changed(at, phase="crashed")
                    yield now if self.plan.without == "failed" else self.writes(now, at, -1, {"ended": {"rank": at}})
                for thread, (phase, places) in enumerate(rank.threads):
                    if fault == "raise" and phase == "busy" and not any(it[:2] == (at, thread) for it in state.log):
                        now = less.in_thread(at, thread, "done", places)
                        yield self.writes(now, at, thread, {"ended": {"rank": at, "failed": "it"}})

    def writes(self, state: State, at: int, thread: int, message: Any) -> State:
        state = state._replace(log=(*state.log, Write(at, thread, json.dumps(message))))
        return state if self.plan.holes else self.has_set(state, len(state.log) - 1)

    def has_set(self, state: State, place: int) -> State:
        log = [*state.log]
        log[place] = log[place]._replace(is_set=True)
        skips = self.plan.without == "stops at a hole"  # rank 0 looks often
        if skips:
            state = self.reads(state, range(1), log[place].text)
        while log and log[0].is_set:
            state = self.reads(state, range(skips, self.plan.ranks), log.pop(0).text)
        return state._replace(log=tuple(log))

    def reads(self, state: State, ranks: range, text: str) -> State:
        """A rank reads again before it acts, so all know at once what can be read."""
        for at in ranks:
            if state.ranks[at].phase not in OVER:
                state = state.changed(at, known=self.step(state.ranks[at].known, text))
        return state

    def check_missing(self, state: State, at: int, missing: list[int], is_behind: bool) -> None:
        """Of a rank that waits."""
        left = {  # by rank, the prompts that it took and has not given
            other: {place for _, places in rank.threads for place in places} for other, rank in enumerate(state.ranks)
        }
        written = [json.loads(each.text) for each in state.log]
        for other, message in zip([each.rank for each in state.log], written, strict=True):
            left[other] |= {message["came"]["slot"]} if "came" in message else {*message.get("took", ())}
        takes = any(phase == "took" for rank in state.ranks for phase, _ in rank.threads)
        takes |= state.taken * self.plan.together < len(self.plan.groups) or any("took" in each for each in written)
        if not takes and not is_behind and (idle := [other for other in missing if not left[other]]):
            raise Fault(f"waits for ranks {idle}, which have given all that they took")
        works = any(not self.is_done(state, at, thread) for thread in range(len(state.ranks[at].threads)))
        works |= any(each.rank == at and not each.is_set for each in state.log)
        if not missing and not works:
            raise Fault("waits for no rank, and only others can go on")

    def ends(self, state: State, at: int) -> State:
        """Leaves, with what it knows of the end."""
        rank, reader = state.ranks[at], self.readers[state.ranks[at].known]
        packs = reader._arrivals.packs
        if reader._ended is None and rank.packs < len(packs[at]):
            raise Fault(f"rank {at} computes {rank.packs} of its packs {packs[at]}")
        end = json.dumps([reader._ended, reader._arrivals.rest, [*map(list, packs)] if self.plan.without else None])
        return state.changed(at, phase="out", known=end)

    def check_end(self, state: State) -> None:
        if stuck := [at for at, rank in enumerate(state.ranks) if rank.phase not in OVER]:
            raise Fault(f"ranks {stuck} wait forever")
        if len(ends := {rank.known for rank in state.ranks if rank.phase == "out"}) > 1:
            raise Fault(f"ranks do not agree: {ends}")


G = ((3, 5), (), (4,), (6, 3, 3), ())
PLANS = {
    "ranks sample": Plan(groups=G, together=2),
    "what is left is assigned": Plan(groups=G[:4], keeps=True),
    "three ranks": Plan(groups=G[2:4], ranks=3),
    "one rank": Plan(groups=G, ranks=1, threads=2),
    "nothing is learned": Plan(groups=((),) * 3, faults=("stop",)),
    "a server samples": Plan(groups=G[:3], threads=1),
    "two threads": Plan(groups=G[2:4], threads=2, keeps=True),
    "holes": Plan(groups=G[2:4], holes=True),
    "two stops": Plan(groups=G[2:4], faults=("stop", "stop")),
    "a stop and an error": Plan(groups=G[1:4], together=2, keeps=True, faults=("stop", "raise")),
    "two errors": Plan(groups=G[2:4], threads=1, faults=("raise", "crash")),
    "a rank dies": Plan(groups=G[2:4], holes=True, faults=("dies",)),
}
LONG = {
    "ranks sample": Plan(groups=G, ranks=3, keeps=True),
    "a server samples": Plan(groups=G, threads=1, keeps=True),
    "a server samples for three": Plan(groups=G[:3], ranks=3, threads=1),
    "holes": Plan(groups=G[2:4], threads=1, holes=True, faults=("stop",)),
    "a rank dies": Plan(groups=G[2:4], threads=1, holes=True, faults=("dies",)),
    "a stop, and a rank dies": Plan(groups=G[1:4], holes=True, faults=("stop", "dies")),
}


@pytest.mark.parametrize("plan", [*PLANS.values(), *map(slow, LONG.values())], ids=[*PLANS, *LONG])
def test_no_plan_can_stop(plan: Plan) -> None:
    assert Walk(plan).run() > 20


@pytest.mark.parametrize(
    ("rule", "plan", "words"),
    [
        ("free again", "ranks sample", "waits for no rank"),
        ("a stop is written", "two stops", "wait forever"),
        ("failed", "two errors", "wait forever"),
        ("no end after the last completion", "two stops", "do not agree"),
        ("the first end counts", "two stops", "do not agree"),
        ("one pack for one rank", "a server samples", "were given"),
        ("anyone may take a prompt", "a server samples", "waits for no rank"),
        ("waits for holes", "holes", "waits for no rank"),
        ("waits for holes", "a rank dies", "waits for no rank"),
        ("stops at a hole", "holes", "do not agree"),
    ],
)
def test_without_a_rule_a_plan_fails(rule: str, plan: str, words: str) -> None:
    with pytest.raises(Fault, match=words):
        Walk(replace(PLANS[plan], without=rule)).run()
