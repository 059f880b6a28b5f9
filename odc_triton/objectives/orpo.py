"""ORPO, odds ratio preference optimisation, as an objective of `run_step`.

    nll       = -1/T  sum over the chosen samples' tokens t, without each sample's first, of log p(x_t | x_<t)
    logp(y)   = 1/|y|  sum over the tokens t of a completion y, without a sample's first, of log p(x_t | x_<t)
    log_odds  = log P(c) / (1 - P(c)) - log P(r) / (1 - P(r))    of a pair's completions c, r; P(y) = exp(logp(y))
    loss      = nll - beta / N  sum over pairs of log sigmoid(log_odds)

T: all ranks' such tokens, those of prompts too; c: chosen, r: rejected; N: all ranks' pairs. Sources: arXiv 2403.07691,
equations 4, 6 and 7; trl/experimental/orpo/orpo_trainer.py of TRL 1.16.

[Note: readers] Of samples that share a prompt one computes it, maybe a rejected one, maybe on another rank. So the
log-probability of a token counts in `nll` as often as chosen samples have it: its readers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.head import log_probs
from ..packs.collate import pack_collate
from ..packs.loss import NO_ROUTER_LOSS, predictions, refuse_router_loss
from ..plan.entries import Entry, Piece, begins, number_of
from ..plan.fields import IGNORED
from ..plan.pieces import reads_of
from ..plan.plan import MinibatchPacks
from ..sequence.sums import SampleSums
from ..step import Objective, Sums, Terms

_OF_PAIRS = ("log_odds_ratio", "log_odds_chosen", "logps/chosen", "logps/rejected", "rewards/accuracies")


@dataclass(frozen=True, kw_only=True, eq=False)
class ORPO(Objective):
    """`samples` 2i and 2i + 1 are the chosen and the rejected one of pair i; labels are IGNORED in the prompt.

        orpo = ORPO(samples=samples)
        report = run_step(model, plan.packs(rank), orpo, collate=orpo.collate)

    plan: of `make_plan`, with pairs as groups. sums: SampleSums(model, samples=len(samples)), if ranks share pairs.
    Report: of sums that `means` divides. An evaluation has no common divisor of both terms: its loss is among these.

    Raises ValueError for half a pair, and at the entry for packs that are not a plan's, pairs that are not together, a
    completion without tokens, pairs over ranks without `sums`, samples without labels, and a router's auxiliary loss.
    As in TRL, the gradient of a completion of probability 1 is not finite.
    """

    samples: Sequence[Mapping[str, Any]]
    beta: float = 0.1
    sums: SampleSums | None = None
    _readers: dict[Piece, Tensor] = field(default_factory=dict, init=False, repr=False)  # of this minibatch
    _learned: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)  # by sample

    def __post_init__(self) -> None:
        if (count := len(self.samples)) % 2:
            raise ValueError(f"pair {count // 2} has only sample {count - 1}: give its rejected sample, or drop it")

    def terms(self, model: nn.Module, packs: Any) -> int:
        """T of the chosen samples that begin on this rank."""
        refuse_router_loss(model, f"which ORPO leaves out: {NO_ROUTER_LOSS}")
        if not isinstance(packs, MinibatchPacks) or not packs.samples:
            raise ValueError("ORPO needs the number of all ranks' pairs: give run_step the packs of make_plan's plan")
        self._learned.clear()
        self._require_pairs(packs)
        planned = [] if packs.split is None else [each.piece for each in packs.split.pieces]
        own = [self._piece(entry) for pack in packs for entry in pack]
        self._count_readers([*planned, *own])
        return sum(self._piece(each.sample).stop - 1 for each in own if begins(each) and each.sample % 2 == 0)

    def _require_pairs(self, packs: MinibatchPacks) -> None:
        waves = {} if packs.split is None else {each.piece.sample: each.wave for each in packs.split.pieces}
        for here in ({*map(number_of, pack)} for pack in packs):
            for sample in sorted(here):
                pair, other = f"pair {sample // 2}", sample ^ 1
                row = self.samples[sample] if sample < len(self.samples) else {}
                if row.get("labels") is None or len(row["labels"]) != len(row["input_ids"]):
                    raise ValueError(f"{pair}: sample {sample} has no label for each of its input_ids: give labels")
                if not self._completion(self._piece(sample)).any():
                    raise ValueError(
                        f"{pair}: the completion of sample {sample} has no tokens to predict: drop the pair"
                    )
                if other not in here and waves.get(sample, -1) != waves.get(other):
                    raise ValueError(f"{pair}: sample {sample} is packed without {other}: plan with pairs as groups")
                if sample in waves and self.sums is None:
                    raise ValueError(f"{pair} is on several ranks: give ORPO sums=SampleSums(model, samples=…)")

    def _count_readers(self, pieces: Sequence[Piece]) -> None:
        """By piece, of each token of its sample that it predicts: see [Note: readers]."""
        reads = reads_of({*pieces})
        self._readers.clear()
        self._readers.update((each, torch.zeros(self._piece(each.sample).stop, dtype=torch.int64)) for each in reads)
        for piece, before in ((each, reads[each]) for each in reads if each.sample % 2 == 0):
            for holder, low, high in (*(before if begins(piece) else ()), (piece, piece.start, piece.stop)):
                self._readers[holder][low + 1 : high + 1] += 1

    def collate(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """A model's input. Of its n targets `readers`, [n], and `place`, [n]: 0 in prompts, and in completions of the
        P `pairs` that have some here 1 + 2p + (0: chosen, 1: rejected). `lengths`, [P, 2]: of whole completions;
        `share`, [P]: the part of the chosen one that is here, so that a pair on several ranks counts once.
        """
        pieces = [*map(self._piece, entries)]
        if missing := {*pieces} - self._readers.keys():
            raise RuntimeError(f"{missing.pop()} is of no minibatch of this ORPO: give run_step collate=orpo.collate")
        pairs = [*dict.fromkeys(each.sample // 2 for each in pieces if self._completion(each).any())]
        rows, readers, places = [], [], []
        for entry, piece in zip(entries, pieces, strict=True):
            sample, completion = self.samples[piece.sample], self._completion(piece)
            scored = completion | (self._readers[piece] > 0)
            labels = torch.as_tensor(sample["input_ids"]).where(scored, IGNORED)
            rows.append({**sample, "labels": labels, "piece": entry if isinstance(entry, Piece) else None})
            readers.append(self._readers[piece][scored])
            place = 1 + 2 * pairs.index(piece.sample // 2) + piece.sample % 2 if completion.any() else 0
            places.append(completion[scored] * place)
        whole = [[self._completion(self._piece(2 * pair + side)).sum() for side in (0, 1)] for pair in pairs]
        place, lengths = torch.cat(places), torch.tensor(whole, dtype=torch.float64).view(-1, 2)
        share = place.bincount(minlength=1 + lengths.numel())[1::2] / lengths[:, 0]
        added = {"readers": torch.cat(readers).double(), "place": place, "lengths": lengths, "share": share}
        return {**pack_collate([rows])[0], **added, "pairs": tuple(pairs)}

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        logp = log_probs(*predictions(model, pack)).logp.double()
        nll = -(pack["readers"] * logp).sum()
        logp_P2 = logp.new_zeros(1 + pack["lengths"].numel()).index_add(0, pack["place"], logp)[1:].view(-1, 2)
        if self.sums is not None and pack["pairs"]:  # over whole completions; this pack's get gradients
            own = dict(zip(pack["pairs"], logp_P2.detach(), strict=True))
            found = self.sums.over_ranks(own, lambda piece: bool(self._completion(piece).any()), lambda each: each // 2)
            logp_P2 = logp_P2 + (torch.stack([*found.values()]) - logp_P2.detach())
        logp_P2 = logp_P2 / pack["lengths"]
        # log(1 - P), whose branches meet where neither cancels.
        rest_P2 = torch.where(logp_P2 < -math.log(2), (-logp_P2.exp()).log1p(), (-logp_P2.expm1()).log())
        log_odds, (chosen, rejected) = -(logp_P2 - rest_P2).diff(dim=1)[:, 0], logp_P2.unbind(1)
        log_ratio = F.logsigmoid(log_odds)
        of_pairs = torch.stack([log_ratio, log_odds, chosen, rejected, (chosen > rejected).double()]).detach()
        sums = dict(zip(_OF_PAIRS, of_pairs @ pack["share"], strict=True))
        # The value is this pack's share; the gradients are those of all of its tokens.
        ratio = sums["log_odds_ratio"] + log_ratio.sum() - log_ratio.detach().sum()
        counts = {"pairs": pack["share"].sum(), "nll_tokens": pack["readers"].sum()}
        return nll / terms.number - self.beta * ratio / (terms.samples / 2), {**counts, "nll_loss": nll, **sums}

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The loss, and TRL's metrics but for those of logits, of a report's sums."""
        if not sums.get("pairs"):
            raise ValueError("no pair was computed: there are no means")
        nll, found = sums["nll_loss"] / sums["nll_tokens"], {name: sums[name] / sums["pairs"] for name in _OF_PAIRS}
        chosen, rejected = self.beta * found["logps/chosen"], self.beta * found["logps/rejected"]
        rewards = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return {"loss": nll - self.beta * found["log_odds_ratio"], "nll_loss": nll, **found, **rewards}

    def _piece(self, entry: Entry) -> Piece:
        return entry if isinstance(entry, Piece) else Piece(entry, 0, len(self.samples[entry]["input_ids"]))

    def _completion(self, piece: Piece) -> Tensor:
        """Of each token of the whole sample: is it of the completion, and does `piece` predict it?"""
        if piece.sample not in self._learned:
            self._learned[piece.sample] = torch.as_tensor(self.samples[piece.sample]["labels"]) != IGNORED
        found = self._learned[piece.sample].clone()
        found[: piece.start + 1] = found[piece.stop + 1 :] = False
        return found
