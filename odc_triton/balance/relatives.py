"""Samples that begin alike: the tokens that they share are computed once in each pack that holds several of them.

In a pack a sample may *branch off* another: of its tokens only those from `start` on are computed, and they attend to
the other's rows before `start`, which are of the same tokens at the same positions. A branch begins with the last token
that is shared, as that predicts its first own token. So every target has a row of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.records import IGNORED
from .line import BY_TOKENS, Strip, cut_line
from .pieces import Entry

LEAST_SHARED = 32  # tokens: computing fewer again takes no longer than reading them


@dataclass(frozen=True, slots=True)
class Relatives:
    """Of samples by number. `lengths`: their tokens; `order`: the samples in the order of their tokens; `place`: of
    each in it; `shared`: by place, the tokens that a sample shares with the one before it; `free`: by sample, the
    tokens before its first target; `contents`: by sample, a hash of all that it shares with others.
    """

    lengths: list[int]
    order: list[int]
    place: list[int]
    shared: np.ndarray
    free: list[int]
    contents: list[str]

    def entries(self, samples: Sequence[int]) -> list[Entry]:
        """These samples in one pack: whole, or as branches of others of them, which come before their branches."""
        (part,) = cut_line(self.strips(samples), [1.0], BY_TOKENS)
        return part

    def strips(self, samples: Sequence[int]) -> list[Strip]:
        """Of these samples in the order of tokens, those that are not another's before it. `uncut` is the first that
        predicts a target.
        """
        strips: dict[int, Strip] = {}
        before = None
        for place in sorted(self.place[sample] for sample in samples):
            sample = self.order[place]
            start = 0 if before is None else self._start(before, place)
            parent = self.order[before] if start else None
            while start and strips[parent].start >= start:  # then what that one branches off has all of these tokens
                parent = strips[parent].parent
            uncut = max(self.free[sample] - 1, 0)
            strips[sample], before = Strip(sample, start, self.lengths[sample], parent, uncut), place
        return [*strips.values()]

    def families(self) -> list[list[Strip]]:
        """All samples, in runs of which only the first starts at 0."""
        found: list[list[Strip]] = []
        for strip in self.strips(self.order):
            if strip.start == 0:
                found.append([])
            found[-1].append(strip)
        return found

    def _start(self, before: int, place: int) -> int:
        """The first own token of the sample at `place` where that at `before` is in the same pack; 0: it is whole."""
        alike = min(int(self.shared[before + 1 : place + 1].min()), self.free[self.order[place]])
        return alike - 1 if alike >= LEAST_SHARED else 0


def find_relatives(samples: Sequence[Mapping[str, Any]]) -> Relatives:
    """Compares the samples' tokens. `samples`: as `pack_collate` takes them, with `input_ids` and maybe `labels`.

    Only tokens that are not learned are shared: a sample without labels shares none.
    """
    ids = [np.asarray(each["input_ids"], dtype=np.int32) for each in samples]
    free = []
    for each in samples:
        labels = each.get("labels")
        learned = [] if labels is None else np.flatnonzero(np.asarray(labels)[1:] != IGNORED)
        free.append(0 if labels is None else int(learned[0]) + 1 if len(learned) else len(labels))
    order = sorted(range(len(ids)), key=lambda i: ids[i].astype(">i4").tobytes())
    place = [0] * len(ids)
    shared = np.zeros(len(ids), dtype=np.int64)
    for at, sample in enumerate(order):
        place[sample] = at
        if at:
            one, other = ids[order[at - 1]], ids[sample]
            common = min(len(one), len(other))
            differ = np.flatnonzero(one[:common] != other[:common])
            shared[at] = differ[0] if len(differ) else common
    contents = []
    for each, at in zip(ids, place, strict=True):
        most = max(shared[at : at + 2])
        contents.append(hashlib.sha256(each[:most].tobytes()).hexdigest()[:16])
    return Relatives([len(each) for each in ids], order, place, shared, free, contents)
