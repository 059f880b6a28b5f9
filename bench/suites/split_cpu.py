"""Splitting on two real ranks, minibatch by minibatch beside LB-Mini, FSDP2 in two settings and DDP.

LongAlign-like lengths, scaled so that the longest has 4,096 tokens: at that length attention is half of this model's
work, as at 64K of a 7 B model's. Lengths, model and minibatches were fixed before anything was measured. The tokens are
random: what is timed does not depend on them.

Of each row: `bound`, how much faster than LB-Mini the best balance would be by the cost model, the largest rank's cost
over the even share; `over_fastest`, split ODC against the fastest of all others.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from odc_triton.balance import assign
from odc_triton.comm.launch import launch

from ..cut import cut, scaled_minibatches
from ..harness import Measured, Work, bootstrap_ratio, compare, disturbed
from ..variants import Ddp, Fsdp2, Fsdp2NoReshard, Odc, OdcSplit

RANKS = 2
KINDS = (OdcSplit, Odc, Fsdp2, Fsdp2NoReshard, Ddp)
LENGTHS, LONGEST = "longalign", 4096
CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": False,
}
MINIBATCHES = {1: 60, 2: 20, 4: 12}  # by samples per rank
WARM_UP = 1
SECONDS_PER_TOKEN = 0.42e-3  # of a variant on the slower rank, roughly: for the time that is expected
COLUMNS = ("samples/rank", "over LB-Mini", "over the fastest", "over DDP", "bound", "minibatches", "anew", "disturbed")


def work_of(
    folder: Path,
    samples: int,
    minibatches: int,
    *,
    ranks: int = RANKS,
    longest: int = LONGEST,
    config: dict = CONFIG,
) -> Work:
    """`minibatches` after `WARM_UP`, of `samples` per rank. Writes the data into `folder`."""
    lengths, drawn = scaled_minibatches(
        LENGTHS, longest=longest, samples=samples * ranks, minibatches=WARM_UP + minibatches, seed=samples
    )
    text = np.random.default_rng(samples).integers(0, config["vocab_size"], sum(lengths))
    path = folder / f"split_{ranks}_{samples}.npz"
    cut(text, lengths).save(path)
    return Work(dataset=str(path), config=config, minibatches=drawn, token_cap=longest)


def seconds_of(work: Work) -> float:
    """What measuring it will take, roughly."""
    lengths = work.data().lengths
    longest_rank = sum(max(sum(map(int, lengths[m])) / RANKS, int(max(lengths[m]))) for m in work.minibatches)
    return len(KINDS) * SECONDS_PER_TOKEN * longest_rank


def run(work: Work, samples: int, progress: bool = True) -> dict:
    """Measures one number of samples per rank; its row."""
    return row_of(work, samples, launch(compare, KINDS, work, progress, WARM_UP, ranks=RANKS)[0])


def bound(work: Work) -> float:
    """See the module: over all minibatches after those that warm up."""
    cost, data = work.cost(), work.data()
    largest, even = [], []
    for samples in work.minibatches[WARM_UP:]:
        lengths = [int(data.lengths[index]) for index in samples]
        dealt = assign(lengths, ranks=RANKS, token_cap=work.token_cap, balance=Odc.balance, cost=cost)
        of_ranks = [math.fsum(cost.sequence(lengths[i]) for pack in packs for i in pack) for packs in dealt]
        largest.append(max(of_ranks))
        even.append(sum(of_ranks) / RANKS)
    return math.fsum(largest) / math.fsum(even)


def row_of(work: Work, samples: int, results: list[Measured]) -> dict:
    timed = {result.name: result.seconds[WARM_UP:] for result in results}
    split = timed[OdcSplit.name]
    fastest = min((name for name in timed if name != OdcSplit.name), key=lambda name: sum(timed[name]))
    last = [result.losses[-1] for result in results]
    return {
        "samples_per_rank": samples,
        "split_over_lb_mini": bootstrap_ratio(timed[Odc.name], split),
        "over_fastest": {**bootstrap_ratio(timed[fastest], split), "name": fastest},
        "over_ddp": bootstrap_ratio(timed[Ddp.name], split),
        "bound": bound(work),
        "minibatches": len(split),
        "disturbed": disturbed(results, WARM_UP),
        "loss_spread": (max(last) - min(last)) / min(last),
        "seconds": timed,
        "waited_s": {result.name: result.waited_s[WARM_UP:] for result in results},
    }


def cells_of(row: dict) -> list[object]:
    """A line of the table."""

    def ratio(of: dict) -> str:
        return f"{of['ratio']:.2f} ({of['low']:.2f} to {of['high']:.2f})"

    return [
        row["samples_per_rank"],
        ratio(row["split_over_lb_mini"]),
        f"{ratio(row['over_fastest'])}, {row['over_fastest']['name']}",
        ratio(row["over_ddp"]),
        f"{row['bound']:.2f}",
        row["minibatches"],
        row["disturbed"]["measured_anew"],
        row["disturbed"]["left"],
    ]
