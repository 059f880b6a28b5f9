"""Objectives on pairs of a chosen and a rejected sample: what is counted, checked and summed of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..packs.collate import pack_collate
from ..packs.loss import NO_ROUTER_LOSS, refuse_router_loss
from ..plan.entries import Entry, Segment, begins, number_of
from ..plan.fields import IGNORED
from ..plan.plan import MinibatchPacks
from ..sequence.sums import SampleSums
from ..step import Objective, Sums


@dataclass(frozen=True, kw_only=True, eq=False)
class PairObjective(Objective):
    """A loss of pairs. Terms: pairs.

    samples: 2i and 2i + 1 are the chosen and the rejected one of pair i; labels are -100 in the prompt. They are
        planned by `make_plan`, with pairs as groups.
    sums: SampleSums(model, samples=len(samples)), if ranks share pairs.

    Raises ValueError for half a pair, and at the entry for packs that are not a plan's, pairs that are not together, a
    completion without tokens, pairs over ranks without `sums`, samples without labels, and a router's auxiliary loss.
    """

    samples: Sequence[Mapping[str, Any]]
    sums: SampleSums | None = None
    _learned: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)  # by sample

    def __post_init__(self) -> None:
        if (count := len(self.samples)) % 2:
            raise ValueError(f"pair {count // 2} has only sample {count - 1}: give its rejected sample, or drop it")

    def terms(self, model: nn.Module, packs: Any) -> int:
        """The pairs whose chosen samples begin on this rank."""
        refuse_router_loss(model, f"which {type(self).__name__} leaves out: {NO_ROUTER_LOSS}")
        if not isinstance(packs, MinibatchPacks) or not packs.samples:
            raise ValueError(
                f"{type(self).__name__} needs the number of all ranks' pairs: give run_step the packs of make_plan's "
                f"plan"
            )
        self._learned.clear()
        self._require_pairs(packs)
        return len(self._chosen(packs))

    def _chosen(self, packs: MinibatchPacks) -> list[int]:
        """The chosen samples that begin on this rank."""
        return [number_of(each) for pack in packs for each in pack if begins(each) and number_of(each) % 2 == 0]

    def _require_pairs(self, packs: MinibatchPacks) -> None:
        waves = {} if packs.split is None else {each.segment.sample: each.wave for each in packs.split.segments}
        for here in ({*map(number_of, pack)} for pack in packs):
            for sample in sorted(here):
                pair, other = f"pair {sample // 2}", sample ^ 1
                row = self.samples[sample] if sample < len(self.samples) else {}
                if row.get("labels") is None or len(row["labels"]) != len(row["input_ids"]):
                    raise ValueError(f"{pair}: sample {sample} has no label for each of its input_ids: give labels")
                if not self._completion(self._segment(sample)).any():
                    raise ValueError(
                        f"{pair}: the completion of sample {sample} has no tokens to predict: drop the pair"
                    )
                if other not in here and waves.get(sample, -1) != waves.get(other):
                    raise ValueError(f"{pair}: sample {sample} is packed without {other}: plan with pairs as groups")
                if sample in waves and self.sums is None:
                    raise ValueError(
                        f"{pair} is on several ranks: give {type(self).__name__} sums=SampleSums(model, samples=…)"
                    )

    def collate(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """A model's input. `place`, [n], by target: 0 in prompts; 1 + 2p + (0: chosen, 1: rejected) in completions of
        the P `pairs` that have some here. `lengths`, [P, 2]: of full completions; `share`, [P]: the part of the chosen
        one that is here, so that a pair on several ranks counts once.
        """
        segments = [*map(self._segment, entries)]
        pairs = [*dict.fromkeys(each.sample // 2 for each in segments if self._completion(each).any())]
        rows, places = [], []
        for entry, segment in zip(entries, segments, strict=True):
            sample, completion, scored = self.samples[segment.sample], self._completion(segment), self._scored(segment)
            labels = torch.as_tensor(sample["input_ids"]).where(scored, IGNORED)
            rows.append({**sample, "labels": labels, "segment": entry if isinstance(entry, Segment) else None})
            place = 1 + 2 * pairs.index(segment.sample // 2) + segment.sample % 2 if completion.any() else 0
            places.append(completion[scored] * place)
        whole = [[self._completion(self._segment(2 * pair + side)).sum() for side in (0, 1)] for pair in pairs]
        place, lengths = torch.cat(places), torch.tensor(whole, dtype=torch.float64).view(-1, 2)
        share = place.bincount(minlength=1 + lengths.numel())[1::2] / lengths[:, 0]
        return {**pack_collate([rows])[0], "place": place, "lengths": lengths, "share": share, "pairs": tuple(pairs)}

    def of_pairs(self, pack: Mapping[str, Any], values: Tensor) -> Tensor:
        """Sums of the n targets' `values` over whole completions, [P, 2] in fp64; this pack's get gradients."""
        values = values.double()
        found = values.new_zeros(1 + pack["lengths"].numel()).index_add(0, pack["place"], values)[1:].view(-1, 2)
        if self.sums is None or not pack["pairs"]:
            return found
        own = dict(zip(pack["pairs"], found.detach(), strict=True))
        whole = self.sums.over_ranks(own, lambda segment: bool(self._completion(segment).any()), lambda each: each // 2)
        return found + (torch.stack([*whole.values()]) - found.detach())

    def counted(self, pack: Mapping[str, Any], of_pairs: Mapping[str, Tensor]) -> Sums:
        """Sums over this rank's share of the pairs, of numbers of each pair, [P], by name; and how many `pairs`."""
        share = pack["share"]
        return {"pairs": share.sum(), **{name: (each.detach() * share).sum() for name, each in of_pairs.items()}}

    def total(self, pack: Mapping[str, Any], losses: Tensor) -> Tensor:
        """The sum of the pairs' `losses`, [P]: its value is this rank's share, its gradients are those of all of its
        tokens.
        """
        return (losses.detach() * pack["share"]).sum() + losses.sum() - losses.detach().sum()

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss and the metrics, as TRL names them, of a report's sums."""
        if not sums.get("pairs"):
            raise ValueError("no pair was computed: there are no means")
        return {name: value / sums["pairs"] for name, value in sums.items() if name != "pairs"}

    def _segment(self, entry: Entry) -> Segment:
        return entry if isinstance(entry, Segment) else Segment(entry, 0, len(self.samples[entry]["input_ids"]))

    def _scored(self, segment: Segment) -> Tensor:
        """For each token of the sample, True if it is a target that `segment` predicts."""
        return self._completion(segment)

    def _completion(self, segment: Segment) -> Tensor:
        """For each token of the sample, True if it is in the completion and `segment` predicts it."""
        if segment.sample not in self._learned:
            self._learned[segment.sample] = torch.as_tensor(self.samples[segment.sample]["labels"]) != IGNORED
        found = self._learned[segment.sample].clone()
        found[: segment.start + 1] = found[segment.stop + 1 :] = False
        return found


def rewards(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """What TRL shows of each pair's two rewards, [P]."""
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "rewards/margins": chosen - rejected,
    }
