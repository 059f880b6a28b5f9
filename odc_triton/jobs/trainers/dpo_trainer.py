"""`ODCDPOTrainer`: TRL's DPOTrainer, whose step is one minibatch of this rank's packs.

TRL prepares the data, and its own loss runs on one pack after another: pair_trainer.py. The loss "sft", a mean over
chosen tokens, gets the weight that makes it one over those of all ranks. A reference is read within the minibatch,
before the policy's forward of the same pack, and TRL's loss gets its log-probabilities as if they were precomputed.

[Note: the reference] TRL would load a whole reference model, or add an adapter to a model that is sharded already.
Its constructor is given an empty module instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...nn.head import FusedLogits, log_probs
from ...nn.operand import is_sharded
from ...packs.enable import innermost, refuse_unpacked, takes_branches
from ...packs.loss import predictions
from ...packs.neftune import embedding_noise
from .pair_trainer import PairTrainer
from .trl_metrics import GET_TRL, TRL

try:
    from trl import DPOConfig, DPOTrainer
except ImportError as error:
    raise ImportError(f"ODCDPOTrainer needs TRL {TRL}: {GET_TRL}") from error

_LOGPS = ["ref_chosen_logps", "ref_rejected_logps"]


class ODCDPOTrainer(PairTrainer, DPOTrainer):
    """TRL's DPOTrainer on a model of `fully_shard`.

        enable_packing(model)
        model = fully_shard(model)
        trainer = ODCDPOTrainer(model, args=DPOConfig(...), train_dataset=pairs)
        trainer.train()

    Pass the sharded model, on every rank, and TRL's other arguments. One step takes world *
    `per_device_train_batch_size` * `gradient_accumulation_steps` pairs, assigned to the ranks by what they cost; the
    tokens that documents of a pack begin with are computed once. Loss and metrics are TRL's over all ranks' pairs. With
    a fused head there are no `logits/…` and no `mean_token_accuracy`. Losses that sort a batch are refused, and so are
    images. Evaluation, checkpoints and resuming are as ODCTrainer's.

    The reference is `ref_model`, sharded; or the log-probabilities of the columns `ref_chosen_logps` and
    `ref_rejected_logps`; or the adapter "ref" of a PEFT model, else that without adapters, also if they are trained
    already; or a model that is loaded from the folder or hub id that the model came from, and sharded.

    model: what `fully_shard` returned.
    args: as DPOTrainer's.
    trainer: other arguments of DPOTrainer, such as `train_dataset`. Also `sampler`, a MinibatchSampler of this rank
        over the pairs, and `share_prefixes`, "off" to compute each document's first tokens by themselves.

    Raises ValueError or TypeError for a model that is not sharded and packed and for unsupported arguments,
    ImportError for another TRL.
    """

    config = DPOConfig
    refused: ClassVar[Mapping[str, str]] = PairTrainer.refused | {
        "sync_ref_model": "it would write into the reference's shards: leave it out",
        "precompute_ref_log_probs": "a sharded reference takes little memory: leave it out, or give the columns "
        "ref_chosen_logps and ref_rejected_logps",
    }

    def __init__(
        self, model: PreTrainedModel, ref_model: nn.Module | None = None, args: DPOConfig | None = None, **trainer: Any
    ) -> None:
        if ref_model is not None:
            if not is_sharded(ref_model) or ref_model is model:
                raise ValueError(
                    f"ref_model is {'the model itself' if ref_model is model else 'not sharded'}: call enable_packing "
                    f"and fully_shard on one of its own, or leave it out"
                )
            refuse_unpacked(ref_model, "ref_model")
        nothing = nn.Identity()  # see [Note: the reference]
        nothing.config = getattr(model, "config", None)
        super().__init__(model, args, ref_model=nothing, **trainer)
        if self.aux_loss_enabled:
            raise ValueError(
                f"the model's auxiliary loss has router_aux_loss_coef {self.router_aux_loss_coef}, and is a mean over "
                f"a batch's tokens: set router_aux_loss_coef=0.0 in DPOConfig"
            )
        self._is_given = ref_model is not None
        self._loss_weights = self.loss_weights
        self._set_reference(ref_model)

    def _check_arguments(self, args: DPOConfig) -> None:
        super()._check_arguments(args)
        for each in {"aot", "aot_unpaired"} & {*args.loss_type}:
            raise ValueError(f"DPOConfig has loss_type {each!r}, which sorts a batch, and packs differ: choose another")

    def _set_reference(self, ref_model: nn.Module | None) -> None:
        given = self.eval_dataset
        evaluated = given.values() if isinstance(given, dict) else [] if given is None else [given]
        known = all(set(_LOGPS) <= set(each.column_names or ()) for each in (self.train_dataset, *evaluated))
        if ref_model is None and not known and hasattr(self.model, "get_base_model"):
            self._check_adapters()
        elif ref_model is None and not known:
            ref_model = self._sharded_reference("there is no ref_model")
        if ref_model is not None:
            self._shares = self._shares and takes_branches(innermost(ref_model))
            ref_model = self._wrap_model(ref_model.eval())
        self.ref_model = ref_model

    def _measure(self, packs: Sequence[Mapping[str, Any]]) -> None:
        if "sft" in self.loss_types:
            mine = [sum(int(_counts(pack)[0]) for pack in packs), self._count_targets(packs)]
            reports = self._engine.exchange("count chosen tokens", {"counts": mine})
            chosen, every = map(sum, zip(*(each["counts"] for each in reports), strict=True))
            self._chosen_per_pair = chosen / max(every, 1)

    def _mean_loss_of(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self._is_given or _LOGPS[0] not in inputs:
            if self.ref_model is None and not hasattr(model, "get_base_model"):
                raise ValueError(
                    f"the data evaluated have no {_LOGPS[0]} and {_LOGPS[1]}, which the training data have, and there "
                    f"is no ref_model: give the columns, or a ref_model"
                )
            logps = self.compute_ref_log_probs(partial(self._outputs, self.ref_model or model), inputs)
            inputs = inputs | dict(zip(_LOGPS, logps, strict=True))
        chosen, rejected = map(int, _counts(inputs))
        by_tokens = {"entropy": chosen + rejected, "logits/rejected": rejected}
        self._pack_metrics.counts = by_tokens | dict.fromkeys(("logits/chosen", "mean_token_accuracy"), chosen)
        if "sft" in self.loss_types:
            share = chosen / (self._chosen_per_pair * self._pack_metrics.rows)
            weights = zip(self.loss_types, self._loss_weights, strict=True)
            self.loss_weights = [weight * share if name == "sft" else weight for name, weight in weights]
        self.precompute_ref_logps = True  # TRL's loss takes them from the batch; its `evaluate` would compute them
        try:
            return self._compute_loss(partial(self._outputs, model), inputs, False)
        finally:
            self.precompute_ref_logps = False

    def _outputs(
        self, model: nn.Module, *, input_ids: Tensor, pack: Mapping[str, Any], targets: Tensor, **_: Any
    ) -> SimpleNamespace:
        """As TRL's fused head returns, [2n, S - 1] each, 0 where there is no target; of one row without padding."""
        with embedding_noise(model, self._noise_alpha, pack):
            logits, ids = predictions(model, pack)
        logits = logits.float()
        scored = log_probs(logits, ids)
        found = {"log_probs": scored.logp, "entropy": scored.entropy.detach()}
        with torch.no_grad():
            if not isinstance(logits, FusedLogits):
                found |= {"mean_logits": logits.mean(-1), "is_top1": logits.argmax(-1) == ids}
                if self.use_weighting:
                    found["log_sum_sq_probs"] = (2 * logits.log_softmax(-1)).logsumexp(-1)
            elif self.use_weighting:
                raise ValueError("use_weighting needs all probabilities, which a fused head does not have: set False")
            else:
                found |= {"mean_logits": torch.zeros_like(scored.logp), "is_top1": torch.zeros_like(ids).bool()}
                unknown = ("logits/chosen", "logits/rejected", "mean_token_accuracy")
                self._pack_metrics.counts |= dict.fromkeys(unknown, 0)
        shape, at = (len(input_ids), input_ids.shape[1] - 1), targets.unbind()
        return SimpleNamespace(**{name: each.new_zeros(shape).index_put(at, each) for name, each in found.items()})


def _counts(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The completion's tokens of chosen and of rejected rows."""
    return [part.sum() for part in batch["completion_mask"][:, 1:].chunk(2)]
