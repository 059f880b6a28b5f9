"""ORPO, odds ratio preference optimisation, as an objective of `run_step`.

    nll        = 1/T  sum over chosen samples and their tokens t but the first of -log p(x_t | x_<t)
    logp(y)    = 1/|y|  sum over the tokens t of a completion y of log p(x_t | x_<t)
    log_odds   = log P(y_c) / (1 - P(y_c)) - log P(y_r) / (1 - P(y_r)),  with P(y) = exp(logp(y))
    log_ratio  = log sigmoid(log_odds)
    loss       = nll - beta / N  sum over pairs of log_ratio

y_c, y_r: a pair's chosen and rejected completion; N: all ranks' pairs; T: tokens of the chosen samples on all ranks,
those of prompts too, but of each sample its first. So the two terms have different divisors.

Sources: Hong et al. 2024 (arXiv 2403.07691), equations 4, 6, 7; TRL 1.16, trl/experimental/orpo/orpo_trainer.py.

[Note: prompts of chosen samples] Where samples share a prompt, one of them computes it, maybe a rejected one, maybe on
another rank. So a row is weighted by its *readers*: how many chosen samples have the token that it predicts.
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
from ..plan.pieces import Read, reads_of
from ..plan.plan import MinibatchPacks
from ..sequence.sums import SampleSums
from ..step import Objective, Sums, Terms

_GROUPS = "make the plan with Samples.of(…, groups=[sample // 2 for sample in …])"


@dataclass(frozen=True, kw_only=True, eq=False)
class ORPO(Objective):
    """ORPO's loss of pairs: `samples` 2i and 2i + 1 are pair i's chosen and rejected one, prompt and completion, with
    `labels` of IGNORED at the prompt. Packs are a plan's, of these samples' numbers, with pairs as groups.

        run_step(model, plan.packs(rank), orpo := ORPO(samples=samples), collate=orpo.collate)

    beta: weight of the odds ratio. sums: `SampleSums(model, samples=len(samples))`, where ranks may share a pair.

    Sums, not divided: `pairs`, `nll_tokens`, and TRL's metrics by their names, but for those of logits; `means` divides
    them. In an evaluation the two terms have no common divisor: take `means(report.sums)["loss"]`, not `report.loss`.

    Raises ValueError for an odd number of samples; at the entry of a minibatch for packs of no plan, a pair that is not
    together, a completion without tokens, a shared pair without `sums`, and a model with a router's auxiliary loss.
    """

    samples: Sequence[Mapping[str, Any]]
    beta: float = 0.1
    sums: SampleSums | None = None
    _readers: dict[Entry, Tensor] = field(default_factory=dict, init=False, repr=False)  # of this minibatch's entries

    def __post_init__(self) -> None:
        if (count := len(self.samples)) % 2:
            raise ValueError(
                f"of pair {count // 2} there is only sample {count - 1}: give of each pair the chosen and the rejected"
            )

    def terms(self, model: nn.Module, packs: Any) -> int:
        """T of this rank: a chosen sample counts where it begins."""
        refuse_router_loss(model, f"which ORPO leaves out: {NO_ROUTER_LOSS}")
        if not isinstance(packs, MinibatchPacks) or not packs.samples:
            raise ValueError(
                "ORPO needs the pairs of all ranks: give run_step what Plan.packs(rank) of make_plan returns"
            )
        self._require_pairs(packs)
        entries = [entry for pack in packs for entry in pack]
        self._count_readers(entries, packs)
        chosen = [number_of(entry) for entry in entries if begins(entry) and number_of(entry) % 2 == 0]
        return sum(len(self.samples[sample]["input_ids"]) - 1 for sample in chosen)

    def _require_pairs(self, packs: MinibatchPacks) -> None:
        waves = {each.piece.sample: each.wave for each in packs.split.pieces} if packs.split else {}
        for here in ({*map(number_of, pack)} for pack in packs):
            for sample in sorted(here):
                pair, other = f"pair {sample // 2}", sample ^ 1
                if not self._completion(sample).any():
                    raise ValueError(f"{pair}: sample {sample} has no token to learn after its prompt: drop the pair")
                if other not in here and waves.get(sample, -1) != waves.get(other):
                    raise ValueError(f"{pair}: sample {sample} is in a pack or wave without sample {other}: {_GROUPS}")
                if sample in waves and self.sums is None:
                    raise ValueError(f"{pair} is shared by ranks: give ORPO sums=SampleSums(model, samples=…)")

    def _count_readers(self, entries: Sequence[Entry], packs: MinibatchPacks) -> None:
        """See [Note: prompts of chosen samples]. By entry, int64 over the tokens of its whole sample."""
        planned = [each.piece for each in packs.split.pieces] if packs.split else []
        pieces = reads_of({*planned, *(entry for entry in entries if isinstance(entry, Piece))})
        self._readers.clear()
        for entry in {*entries, *pieces}:
            self._readers[entry] = torch.zeros(len(self.samples[number_of(entry)]["input_ids"]), dtype=torch.int64)
        for entry in self._readers:
            if number_of(entry) % 2 == 0:
                before = pieces[entry] if isinstance(entry, Piece) and begins(entry) else ()
                for holder, low, high in (*before, Read(entry, *_rows(entry))):
                    self._readers[holder][low + 1 : high + 1] += 1

    def collate(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """A model's input, whose n targets are what the loss has to know. Of each of them `readers` and `place`, [n]: 0
        if it is a prompt's, else 1 + 2 * p + side. Of the P `pairs` with completion tokens here `lengths`, [P, 2], of
        the whole completions, and `is_counted`, [P]: 1 in the one pack where the chosen completion begins.
        """
        rows, readers, places, counted = [], [], [], {}
        for entry in entries:
            pair, side = divmod(number_of(entry), 2)
            sample, completion = self.samples[number_of(entry)], self._completion(number_of(entry))
            own, (start, stop) = torch.zeros_like(completion), _rows(entry)
            own[start + 1 : stop + 1] = completion[start + 1 : stop + 1]
            if own.any():
                is_first = side == 0 and bool(own[completion.nonzero()[0, 0]])
                counted[pair] = counted.get(pair, False) or is_first
            scored = own | (self._readers[entry] > 0)
            labels = torch.as_tensor(sample["input_ids"]).where(scored, IGNORED)
            rows.append({**sample, "labels": labels} | ({"piece": entry} if isinstance(entry, Piece) else {}))
            readers.append(self._readers[entry][scored])
            places.append(own[scored] * (1 + 2 * [*counted].index(pair) + side if own.any() else 0))
        (pack,) = pack_collate([rows])
        lengths = [int(self._completion(2 * pair + side).sum()) for pair in counted for side in (0, 1)]
        return {
            **pack,
            "readers": torch.cat(readers).double(),
            "place": torch.cat(places),
            "pairs": tuple(counted),
            "lengths": torch.tensor(lengths, dtype=torch.float64).view(-1, 2),
            "is_counted": torch.tensor([*counted.values()], dtype=torch.float64),
        }

    def loss(self, model: nn.Module, pack: Mapping[str, Any], terms: Terms) -> tuple[Tensor, Sums]:
        logp = log_probs(*predictions(model, pack)).logp.double()  # [n]
        nll = -(pack["readers"] * logp).sum()
        own_P2 = logp.new_zeros(1 + pack["lengths"].numel()).index_add(0, pack["place"], logp)[1:].view(-1, 2)
        chosen, rejected = (self._of_all_ranks(pack["pairs"], own_P2) / pack["lengths"]).unbind(1)
        log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
        log_ratio = F.logsigmoid(log_odds)

        def total(each: Tensor) -> Tensor:  # of what all ranks of a pair know
            return (each.detach() * pack["is_counted"]).sum()

        learned = log_ratio.sum() - log_ratio.detach().sum()  # 0, with the gradients of this rank's tokens
        loss = nll / terms.number - self.beta * (total(log_ratio) + learned) / (terms.samples / 2)
        values = {"log_odds_ratio": log_ratio, "log_odds_chosen": log_odds}
        values |= {"logps/chosen": chosen, "logps/rejected": rejected}
        better, worse = self.beta * chosen, self.beta * rejected
        values |= {"rewards/chosen": better, "rewards/rejected": worse, "rewards/margins": better - worse}
        values["rewards/accuracies"] = (better > worse).double()
        counts = {"pairs": pack["is_counted"].sum(), "nll_tokens": pack["readers"].sum()}
        return loss, {**counts, "nll_loss": nll, **{name: total(each) for name, each in values.items()}}

    def means(self, sums: Mapping[str, float]) -> dict[str, float]:
        """TRL's metrics, and `loss`, of a report's sums."""
        found = {
            name: value / max(sums["pairs"], 1) for name, value in sums.items() if name not in ("pairs", "nll_tokens")
        }
        found["nll_loss"] = sums["nll_loss"] / max(sums["nll_tokens"], 1)
        return {"loss": found["nll_loss"] - self.beta * found["log_odds_ratio"], **found}

    def _of_all_ranks(self, pairs: Sequence[int], own_P2: Tensor) -> Tensor:
        """Sums over whole completions, with the gradients of `own_P2`, over this pack's tokens."""
        if self.sums is None or not pairs:
            return own_P2
        own = dict(zip(pairs, own_P2.detach(), strict=True))
        found = self.sums.over_ranks(own, self._scores, group_of=lambda sample: sample // 2)
        return own_P2 + (torch.stack([found[pair] for pair in pairs]) - own_P2.detach())

    def _scores(self, piece: Piece) -> bool:
        return bool(self._completion(piece.sample)[piece.start + 1 : piece.stop + 1].any())

    def _completion(self, sample: int) -> Tensor:
        """Of each token of a sample, whether it is its completion's, and predicted: [tokens]."""
        labels = self.samples[sample].get("labels")
        found = torch.as_tensor(self.samples[sample]["input_ids"] if labels is None else labels) != IGNORED
        found[0] = False
        return found


def _rows(entry: Entry) -> tuple[int, int]:
    return (entry.start, entry.stop) if isinstance(entry, Piece) else (0, 2**62)  # slices end with the sample


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x < 0; the branches meet where neither cancels."""
    return torch.where(x < -math.log(2), torch.log1p(-torch.exp(x)), torch.log(-torch.expm1(x)))
