"""DPO, ORPO and reward models on packed pairs with on-demand communication.

odc-triton train dpo --data FILE --model FOLDER --out DIR --ranks 2
torchrun --nproc-per-node 2 -m odc_triton.train.dpo --data FILE --model FOLDER --out DIR
"""

from __future__ import annotations

from functools import partial

from ...objectives.dpo import Logits
from ...packs.reference import AdapterReference, Reference
from ..data.dataset import PreparedSamples
from .job import OnMetrics, Sharded, load_frozen, main_of, run_job, train
from .metrics import Metrics
from .pairs_options import DpoOptions, OrpoOptions, PairOptions, RewardOptions
from .pairs_run import PairRun
from .prepare import Prepared
from .sft import check_before_start as check_before_start
from .sft import prepare


def train_pairs(options: PairOptions, on_metrics: OnMetrics | None = None) -> Metrics:
    """Trains to the end on this rank. Every rank of the job calls it.

    Rank 0's output is as in `train_sft`.

    options: those of the command.
    on_metrics: as in `train_sft`.

    Returns the last metrics. Raises as `train_sft`.
    """
    return train(options, prepare, _start, on_metrics)


def _start(options: PairOptions, sharded: Sharded, prepared: Prepared[PreparedSamples]) -> PairRun:
    needs_frozen = isinstance(options, DpoOptions) and not options.lora_rank
    frozen = load_frozen(options, sharded) if needs_frozen else None
    model, cost = sharded(options)
    reference: Logits | None = None
    if isinstance(options, DpoOptions):
        reference = AdapterReference(model) if frozen is None else Reference(frozen, model)
    return PairRun(options=options, model=model, reference=reference, prepared=prepared, cost=cost)


run_pairs = partial(run_job, train_pairs)
_KINDS = (DpoOptions, OrpoOptions, RewardOptions)
main_dpo, main_orpo, main_reward = (partial(main_of, kind, run_pairs) for kind in _KINDS)
