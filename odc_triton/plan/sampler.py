"""MinibatchSampler: this rank's packs, minibatch after minibatch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .cost import CostModel
from .order import Mix, in_families
from .planner import Planner
from .queue import Counter
from .relatives import Relatives
from .samples import Limits, Samples
from .split import readable_tokens
from .strategies import SPLITTING, STRATEGIES, UNEVEN


class MinibatchSampler:
    """Yields, per minibatch, this rank's list of packs, which may be empty: lists of indices into the data set. Its
    `samples` are those of all ranks.

    Works as a DataLoader's `batch_sampler`, the data set wrapped in `PackedDataset` and
    `collate_fn=pack_collate`. A minibatch is the next world * samples_per_rank samples of a shuffle by seed
    and epoch (or of the sets of a `Mix`, by their weights), assigned to the ranks by `balance`: its samples depend
    neither on `balance` nor on the factors of that product. Every rank computes the whole assignment; nothing is
    communicated.

    The position is explicit: `epoch`, and `minibatch`, the index of the next one to yield. Iterating continues from
    there to the end of the epoch; the position is then the start of the next one. So a second `iter` yields the next
    epoch, and one after a `break`, or after `load_state_dict`, finishes the current epoch.

    With balance "queue" it yields `QueuedPacks` instead, whose packs the ranks take at run time, except those
    with segments. Position and samples are the same; a DataLoader, which would take them all at once, cannot be used.

    lengths: tokens of each sample of the data set, or of all data sets, one after the other.
    samples_per_rank: samples per rank and minibatch, on average.
    token_cap: most tokens in one pack.
    balance: "mini" for ODC, "queue" for ODC on ranks that are not equally fast; "micro", "global" or "local" where
        every rank must run equally many microbatches (FSDP).
    seed: of the shuffle; the same on every rank.
    rank, world: default to the environment's RANK and WORLD_SIZE, then to 0 and 1.
    cost: defaults to `CostModel.paper_7b()`; better is `CostModel.from_config(model.config)`.
    extra: of each sample, what it costs in addition to its tokens, in the units of `cost`: of a model with images
        `TowerCost.sample`.
    floors: of each sample, the tokens up to and including its last image's; before that it is not cut. By default those
        of `relatives`.
    targets: of each sample, its learned tokens but its first; `minibatch(model, plan=packs)` then knows their sum.
    drop_last: leave out an epoch's last minibatch if it is not full.
    counter: shared by the ranks of a queue, for this sampler alone; by default `store_counter()`, made when the first
        minibatch is yielded.
    split: split the longest samples over ranks if that should gain at least 5% (balance "mini" or "queue"). Packs may
        then hold a `Segment`, samples may be longer than `token_cap`, and a minibatch's `.split` is the plan for
        `minibatch(split=…)`. An int: of each rank, the most tokens whose keys and values others may read, that is
        `enable_split`'s `tokens`; a minibatch whose samples over the cap need more raises ValueError. True:
        `readable_tokens`, about 0.4 of the longest sample, and enough for any minibatch of these lengths.
    split_cuts: of each rank, the most tokens of a minibatch after which others go on, that is `enable_split`'s `cuts`;
        by default any number, for models without recurrent layers.
    replicas: with `split` the model's number of replicas: consecutive ranks, which split samples among themselves.
    mix: of several data sets, how often an epoch takes each sample; `lengths` has all their numbers. By default an
        epoch takes each sample once.
    relatives: `find_relatives` of the data set (balance "mini"): what samples share is computed once in each pack that
        has several of them, so packs may hold a `Segment` with a `parent`. Another order of samples than without:
        prefix groups are shuffled, not samples, so a group is trained on in one step. A group larger than a minibatch
        goes over several. A prefix that so many samples share that any minibatch has several does not make a group.

    Raises ValueError for any value out of range, for `relatives` of other samples, and, unless `balance` is "mini" or
    "queue", for a last minibatch that the ranks cannot share equally.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        samples_per_rank: int,
        token_cap: int,
        balance: str = "mini",
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
        *,
        cost: CostModel | None = None,
        drop_last: bool = False,
        counter: Counter | None = None,
        split: bool | int = False,
        split_cuts: int | None = None,
        replicas: int = 1,
        mix: Mix | None = None,
        relatives: Relatives | None = None,
        extra: Sequence[float] | None = None,
        floors: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> None:
        self.world = _from_environment("WORLD_SIZE", 1) if world is None else world
        self.rank = _from_environment("RANK", 0) if rank is None else rank
        if self.world < 1:
            raise ValueError(f"world is {self.world}: give the number of ranks, 1 or more")
        if not isinstance(replicas, int) or replicas < 1 or self.world % replicas:
            raise ValueError(f"replicas is {replicas!r}: give a divisor of the world of {self.world} ranks")
        self.replicas = replicas
        reading = {"split_tokens": bool(split), "split_cuts": split_cuts}
        limits = Limits(ranks=self.world, token_cap=token_cap, replicas=replicas, **reading)
        self.lengths = limits.checked(lengths)
        self.mix = Mix((len(self.lengths),)) if mix is None else mix
        if self.mix.numbers != len(self.lengths):
            raise ValueError(f"mix numbers {self.mix.numbers} samples and there are {len(self.lengths)} lengths")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank}, outside a world of {self.world}: give 0 to {self.world - 1}")
        if not isinstance(samples_per_rank, int) or samples_per_rank < 1:
            raise ValueError(f"samples_per_rank is {samples_per_rank!r}: give a whole number, 1 or more")
        if balance not in STRATEGIES:
            raise ValueError(f"balance is {balance!r}: choose one of {', '.join(STRATEGIES)}")
        if relatives is not None and balance != "mini":
            raise ValueError(f"`relatives` with balance {balance!r}: prefixes are shared with balance 'mini' only")
        if relatives is not None and floors is not None and relatives.floors != [*floors]:
            raise ValueError("`relatives` is of samples with other `floors`: give find_relatives of the same data set")
        self.relatives = relatives
        self.samples_per_minibatch = self.world * samples_per_rank
        self.token_cap = token_cap
        self.balance = balance
        self.seed = seed
        if cost is None and extra is not None and any(extra):
            raise ValueError("extra is given without cost: both must have the same unit, so give cost too")
        self.cost = cost or CostModel.paper_7b()
        floors = relatives.floors if floors is None and relatives is not None else floors
        columns = {"earliest_cuts": floors, "extra": extra, "learned": targets, "prefixes": relatives}
        self._samples = Samples.of(self.lengths, self.cost, **columns)
        self.drop_last = drop_last
        if split and balance not in SPLITTING:
            raise ValueError(
                f"split is {split} with balance {balance!r}: sequences are split with balance "
                f"{' or '.join(map(repr, SPLITTING))}"
            )
        if not hasattr(split, "__index__") or split < 0:
            raise ValueError(f"split is {split!r}: give True, or the tokens of each rank that others may read")
        self.split_tokens = int(split)
        if split is True:
            self.split_tokens = readable_tokens(
                self.lengths,
                ranks=self.world,
                samples=self.samples_per_minibatch,
                token_cap=token_cap,
                cost=self.cost,
                replicas=replicas,
                floors=floors,
            )
        limits = replace(limits, split_tokens=self.split_tokens)
        self._planner = Planner(limits=limits, balance=balance, counter=counter)
        if relatives is not None:
            self._family = relatives.family_numbers(most=self.samples_per_minibatch)
            self._digest = relatives.digest()
        self.epoch = 0
        self.minibatch = 0
        if len(self) == 0:
            raise ValueError(
                f"{len(self.mix)} samples do not fill one minibatch of {self.samples_per_minibatch} "
                f"(world {self.world} x samples_per_rank {samples_per_rank}): "
                "lower samples_per_rank, or pass drop_last=False"
            )
        if not drop_last and balance not in UNEVEN and len(self.mix) % self.world:
            raise ValueError(
                f"balance {balance!r} needs as many samples on every rank, but {len(self.mix)} samples "
                f"leave {len(self.mix) % self.world} over on {self.world} ranks in the last minibatch: "
                "pass drop_last=True, or use balance 'mini'"
            )

    def __len__(self) -> int:
        """Minibatches in a whole epoch, at any position."""
        full, rest = divmod(len(self.mix), self.samples_per_minibatch)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:  # of MinibatchPacks or QueuedPacks: DataLoader wants an iterator of lists
        epoch, order = self.epoch, self._order(self.epoch)
        for index in range(self.minibatch, len(self)):
            # Before the yield: a state saved after training on this minibatch counts it as done.
            self.epoch, self.minibatch = divmod(epoch * len(self) + index + 1, len(self))
            start = index * self.samples_per_minibatch
            samples = self._samples.some(order[start : start + self.samples_per_minibatch])
            yield self._planner.packs(samples, self.rank)

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of `epoch`; no effect if it is the current one."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}: give 0 or more")
        if epoch != self.epoch:
            self.epoch, self.minibatch = epoch, 0

    def state_dict(self, *, minibatches_done: int | None = None) -> dict[str, Any]:
        """The position, and its units. The same on every rank and for every `balance`; JSON.

        A DataLoader with workers takes minibatches from the sampler before they are trained on. Then give
        `minibatches_done`, those trained on since epoch 0 began, from which the position is computed.
        """
        done = self.epoch * len(self) + self.minibatch if minibatches_done is None else minibatches_done
        epoch, minibatch = divmod(done, len(self))
        state = {
            "epoch": epoch,
            "minibatch": minibatch,
            "seed": self.seed,
            "samples": len(self.lengths),
            "samples_per_minibatch": self.samples_per_minibatch,
        }
        if len(self.mix.sizes) > 1 or len(self.mix) != len(self.lengths):
            state |= {"sets": list(self.mix.sizes), "taken": list(self.mix.taken)}
        if self.relatives is not None:
            state["relatives"] = self._digest
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores position and seed. The world may have changed, but not world * samples_per_rank.

        state: what `state_dict` returned.

        Raises ValueError for missing or unknown keys, other samples, other prefix groups or another minibatch size, and
        a position outside the epoch; the position is then unchanged.
        """
        own = self.state_dict()
        if state.get("relatives") != own.get("relatives"):
            had, has = (each.get("relatives") is not None for each in (state, own))
            here = ("others" if had else "some") if has else "none"
            raise ValueError(
                f"the state was saved {'with' if had else 'without'} `relatives`, and this sampler has {here}, so its "
                "position would mean other samples: resume with the same data set and `relatives`"
            )
        if state.keys() != own.keys():
            raise ValueError(f"state has keys {sorted(state)}: give what state_dict() returned, {sorted(own)}")
        for key in (name for name in own if name not in ("epoch", "minibatch", "seed")):
            if state[key] != own[key]:
                raise ValueError(
                    f"the state was saved with {key} {state[key]}, here it is {own[key]}, so its position "
                    "would mean other samples: resume with the same data set and world * samples_per_rank"
                )
        if state["epoch"] < 0 or not 0 <= state["minibatch"] < len(self):
            raise ValueError(
                f"the state's position is epoch {state['epoch']}, minibatch {state['minibatch']}, but an "
                f"epoch has {len(self)} minibatches here: resume with the same drop_last"
            )
        self.epoch, self.minibatch, self.seed = state["epoch"], state["minibatch"], state["seed"]

    def _order(self, epoch: int) -> list[int]:
        order = self.mix.order(epoch, str(self.seed))
        if self.relatives is None:
            return order
        most = self.samples_per_minibatch
        return in_families(order, self._family, most=most, seed=f"{self.seed} {epoch} families")


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment's {name} is {text!r}: set an integer, or pass rank and world") from None
