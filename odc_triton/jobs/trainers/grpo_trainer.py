"""`ODCGRPOTrainer`: TRL's GRPOTrainer, whose step is one minibatch of this rank's packs.

TRL's preparation stays: it samples completions, scores them, computes advantages and old and reference
log-probabilities, with its own collectives, outside of minibatches. Then all ranks' completions are assigned to ranks
and packs by their lengths and the tokens that they share, and TRL's own loss runs on one pack after another.

[Note: normalisers] `minibatch` sums gradients over ranks, and TRL's loss is a mean of some kind. For a pack with n
of the N rows of all ranks, and t of their T counted tokens:

| loss | TRL divides the pack's sum by | so a pack's loss is multiplied by |
|---|---|---|
| dapo, cispo, vespo | the generation batch's counted tokens / processes: for `Alone`, one | 1 |
| grpo, sapo, luspo, dr_grpo | n | n / N |
| bnpo | t | t / T |

The sum is then TRL's loss for one process and microbatch that has all rows. TRL subtracts a coefficient times the mean
entropy of a pack's e tokens, of E, before that: the coefficient is multiplied by e / E, and divided by the factor. So
is that of routers' auxiliary losses, whose mean over n rows it adds, by n / N.

[Note: the reference and vLLM] TRL would hold a whole reference model on every rank, and send shards to vLLM. While its
constructor runs, `beta` is 0 and `use_vllm` False, so it makes neither. Then a reference model is made on the meta
device, sharded, and loaded by rows; and `ShardedVllmGeneration` is made. With adapters TRL would add a copy of them;
here the reference is the adapter "ref" if there is one, else the model without adapters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from ...nn.head import log_probs
from ...nn.modes import evaluating
from ...packs.collate import PackedDataset, pack_collate, to_device
from ...packs.enable import innermost, refuse_unpacked, takes_branches
from ...packs.loss import router_predictions
from ...packs.neftune import embedding_noise
from ...packs.padding import padding_leaks
from ...plan.entries import Entry, number_of
from ...plan.fields import IGNORED
from ...plan.packing import best_fit_decreasing
from ...plan.relatives import find_relatives
from ...step import Sums, Terms
from .grpo_rows import AssignedRows, Row, assign_rows, batch_of, counted, in_bonus, rows_of, share_prefixes
from .sharded_trainer import PackLoss, ShardedTrainer
from .trl_metrics import GET_TRL, TRL, Alone, PackMetrics, alone, check_given

try:
    from accelerate.utils import gather_object
    from trl import GRPOConfig, GRPOTrainer

    from .grpo_vllm import ShardedVllmGeneration
except ImportError as error:
    raise ImportError(f"ODCGRPOTrainer needs TRL {TRL}: {GET_TRL}") from error

_BY_ROWS = ("grpo", "sapo", "luspo", "dr_grpo")


class ODCGRPOTrainer(ShardedTrainer, GRPOTrainer):
    """TRL's GRPOTrainer on a model of `fully_shard`.

        enable_packing(model)
        model = fully_shard(model)
        trainer = ODCGRPOTrainer(model, reward, args=GRPOConfig(...), train_dataset=prompts)
        trainer.train()

    Pass the sharded model, on every rank, and TRL's other arguments. One step takes world *
    `per_device_train_batch_size` * `gradient_accumulation_steps` completions, assigned to the ranks by length, and its
    loss is TRL's over all of them. Metrics, the entropy bonus and the quantile of
    `top_entropy_quantile`, for which entropies are computed once more before a step, are those of all ranks. A router's
    auxiliary loss is of each completion with its prompt alone. Images are refused.

    Completions are sampled in evaluation mode, outside of minibatches, so ranks may decode different numbers of tokens.
    A step keeps TRL's phases: all completions are sampled before the first is computed (`train grpo` can overlap both).
    vLLM, in each rank's process or as a server on this host, reads the policy before it samples. With `beta`, a
    reference model is loaded from the folder or hub id that the model came from, and sharded. Of a model with PEFT's
    adapters, added before `fully_shard`, the reference is its adapter "ref", or the model without adapters. Checkpoints
    are as ODCTrainer's.

    model: what `fully_shard` returned.
    reward_funcs, args: as GRPOTrainer's.
    token_cap: the most tokens of a pack; by default those of the minibatch's longest completion with its prompt, or,
    where a pack computes a prompt once for its completions, those of a whole group, if this is much faster and they
    are no more than those of `per_device_train_batch_size` padded rows.
    share_prefixes: "auto": a pack computes what its completions' prompts share once, where the model can; not with
    `neftune_noise_alpha`, whose noise each completion has of its own, or a router's auxiliary loss. "off": for each
    completion.
    trainer: other arguments of GRPOTrainer, such as `train_dataset`.

    Raises ValueError or TypeError for a model that is not sharded and packed and for unsupported arguments,
    ImportError for another TRL.
    """

    takes_adapters: ClassVar[bool] = True
    refused: ClassVar[Mapping[str, str]] = ShardedTrainer.refused | {
        "label_smoothing_factor": "TRL's loss has no labels to smooth: leave it out",
        "cast_lm_head_to_fp32": "it replaces the head of a model that is sharded already: leave it out, the "
        "log-probabilities are in fp32",
        "sync_ref_model": "it would write into the reference's shards: leave it out",
        "use_transformers_continuous_batching": "its attention would replace that of enable_packing: leave it out",
    }

    def __init__(
        self,
        model: PreTrainedModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *,
        token_cap: int | None = None,
        share_prefixes: Literal["auto", "off"] = "auto",
        **trainer: Any,
    ) -> None:
        check_given("ODCGRPOTrainer", args, GRPOConfig, share_prefixes)
        if token_cap is not None and token_cap < 1:
            raise ValueError(f"token_cap is {token_cap}: give the most tokens that a pack may hold, 1 or more")
        self._token_cap = token_cap
        (beta, args.beta), (use_vllm, args.use_vllm) = (args.beta, 0.0), (args.use_vllm, False)
        try:  # see [Note: the reference and vLLM]
            super().__init__(model, args, reward_funcs=reward_funcs, **trainer)
        finally:
            args.beta, args.use_vllm = beta, use_vllm
        self._check_batch()
        shares = share_prefixes == "auto" and self._noise_alpha is None and not self.aux_loss_enabled
        self._share_prefixes, self._router_weight = shares, self.router_aux_loss_coef
        self.beta, self.use_vllm = beta, use_vllm
        if beta and hasattr(model, "get_base_model"):
            self._check_adapters()
        elif beta:
            self.ref_model = self._wrap_model(self._sharded_reference(f"beta is {beta}").eval())
        if use_vllm:
            self.vllm_generation, self._last_loaded_step = ShardedVllmGeneration(self), -1

    def _check_arguments(self, args: GRPOConfig) -> None:
        super()._check_arguments(args)
        accumulated = args.gradient_accumulation_steps
        has_bonus = args.entropy_coef or args.use_adaptive_entropy
        if accumulated > 1 and (args.loss_type == "bnpo" or has_bonus or args.top_entropy_quantile < 1):
            raise ValueError(
                f"gradient_accumulation_steps is {accumulated} with loss_type 'bnpo', an entropy bonus or a "
                f"top_entropy_quantile, which TRL takes over the tokens of each batch: set 1, and {accumulated} times "
                f"the per_device_train_batch_size"
            )
        if args.steps_per_generation % accumulated:
            raise ValueError(
                f"steps_per_generation is {args.steps_per_generation}, which gradient_accumulation_steps={accumulated} "
                f"does not divide: set a multiple of it"
            )
        args.steps_per_generation //= accumulated

    def _check_batch(self) -> None:
        """Checks that need TRL's view of model and tokenizer."""
        if self._is_vlm:
            raise TypeError(f"processing_class is a {type(self.processing_class).__name__}; give a tokenizer, for text")
        model: Any = self.model
        args = self.args
        if padding_leaks(model) and not args.use_vllm:  # TRL pads prompts before it samples
            raise ValueError(
                f"{type(innermost(model)).__name__} has a bias before a convolution, so padding would change its "
                f"completions: set use_vllm=True, or use odc-triton train grpo"
            )
        refuse_unpacked(model)
        corrects = args.use_vllm and args.vllm_importance_sampling_correction
        if corrects and args.loss_type == "vespo" and "token" not in args.vllm_importance_sampling_mode:
            raise ValueError(  # as TRL, which saw no use_vllm
                f"vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r} with loss_type 'vespo': set "
                f"token_truncate or token_mask"
            )
        wanted = args.per_device_train_batch_size * self._engine.world * args.steps_per_generation
        if args.generation_batch_size != wanted:
            raise ValueError(
                f"GRPOConfig has generation_batch_size {args.generation_batch_size}, and {self._engine.world} ranks "
                f"with per_device_train_batch_size {args.per_device_train_batch_size} and steps_per_generation "
                f"{args.steps_per_generation} make {wanted}: make it where torchrun has set its variables, and on "
                f"CPUs with use_cpu=True"
            )
        prompts = wanted // args.num_generations
        if has_length(self.train_dataset) and len(self.train_dataset) < prompts:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} prompts, and a step samples for {prompts}: it would be "
                f"left out as incomplete. Give more prompts, or more num_generations of each"
            )

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's method in evaluation mode: a fused head has no logits in training."""
        with evaluating(self.model):
            if not self.use_vllm:
                self.model.unshard()  # the root's own: PEFT's `generate` never calls the root's forward
            try:
                return super()._generate_single_turn(*args, **kwargs)
            finally:
                self.model.reshard()

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the last `logits_to_keep` tokens, optionally entropies, by packs without padding.

        input_ids, attention_mask: [B, T]. Returns [B, logits_to_keep] in fp32, 0 where a token is masked. Serves the
        loss, with gradients, and old and reference log-probabilities. `batch_size` is not needed: packs have a cap.
        `compute_aux_loss`: also the mean of the rows' routers' auxiliary losses, 0 of a row with nothing to predict.

        Raises ValueError for images.
        """
        if given := sorted(name for name, value in images.items() if value is not None):
            raise ValueError(f"the batch has {', '.join(given)}: only text is supported")
        ids, masks = input_ids.cpu(), attention_mask.bool().cpu()
        first = ids.shape[1] - logits_to_keep
        scored = masks.clone()
        scored[:, :first] = False
        rows = scored.any(1).nonzero().flatten()
        labels = ids.masked_fill(~scored, IGNORED)
        samples = [{"input_ids": ids[row][masks[row]], "labels": labels[row][masks[row]]} for row in rows]
        logps, entropies = torch.zeros(2, len(ids), logits_to_keep, device=input_ids.device)
        router_sum = logps.new_zeros(())
        for pack in self._packs(samples, share=self._share_rows(model)) if samples else []:
            taken = rows[[number_of(entry) for entry in pack]]
            packed = to_device(pack_collate([PackedDataset(samples)[pack]])[0], input_ids.device)
            with embedding_noise(model, self._noise_alpha, packed):
                logits, targets, router = router_predictions(model, packed, compute_aux_loss)
            router_sum = router_sum + router
            found = log_probs(logits.float() / self.temperature, targets)
            place, column = scored[taken, first:].nonzero(as_tuple=True)  # in the pack's order
            where = taken[place].to(input_ids.device), column.to(input_ids.device)
            logps = logps.index_put(where, found.logp)
            entropy = found.entropy if self._entropy_bonus_enabled else found.entropy.detach()
            entropies = entropies.index_put(where, entropy)
        return logps, entropies if compute_entropy else None, router_sum / len(ids) if compute_aux_loss else None

    def _packs(self, samples: list[dict[str, Tensor]], *, share: int) -> list[list[Entry]]:
        """Packs of this rank's `samples`; `share`: see `_share_rows`."""
        if isinstance(self.accelerator, Alone):  # in a minibatch they are one pack already
            every = list(range(len(samples)))
            return [find_relatives(samples).entries(every) if share else every]
        longest = max(len(each["input_ids"]) for each in samples)
        cap = self._token_cap and max(longest, self._token_cap)
        if share:
            return share_prefixes(samples, ranks=1, token_cap=cap, cost=self._cost, most_rows=share).packs(0)
        return best_fit_decreasing([len(each["input_ids"]) for each in samples], token_cap=cap or longest)

    def _share_rows(self, model: nn.Module) -> int:
        """The rows that TRL would compute at once, if the model computes shared prompts once; 0 if not."""
        shares = self._share_prefixes and takes_branches(innermost(model))
        return self.args.per_device_train_batch_size // self._accumulated if shares else 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """One minibatch: forward and backward of this rank's packs. Returns the loss of all ranks' completions."""
        started = time.perf_counter()
        # Completions are sampled by the weights that are trained.
        self._publish_edits("sample completions", partial(self._set_mode, training=True))
        inputs = self._prepare_inputs(inputs)
        if self.top_entropy_quantile < 1:
            inputs = inputs | {"entropy_mask": self._high_entropies(model, inputs)}
        rows, shared = rows_of(inputs)
        assigned, metrics = self._assign(rows), self._metrics["train"]
        with self._alone() as kept:
            loss_of = partial(self._loss_of, assigned, shared, kept, self.entropy_coef)
            loss, report = self._run_step(assigned.packs, PackLoss(lambda packs: assigned.tokens, loss_of), [kept])
        if self.use_adaptive_entropy:
            self._adapt_entropy_coef(report.sums)
        if self._entropy_bonus_enabled:
            metrics["entropy_coef"].append(self.entropy_coef)
        self._step += 1
        metrics["step_time"].append(time.perf_counter() - started)
        return loss

    def _assign(self, rows: list[Row]) -> AssignedRows:
        """Assigns all ranks' rows by their tokens. Collective: ranks exchange their rows."""
        ranks = {"rank": self._engine.rank, "ranks": self._engine.world}
        how = {"token_cap": self._token_cap, "cost": self._cost, "share": self._share_rows(self.model)}
        return assign_rows(gather_object(rows), **ranks, **how)

    @torch.no_grad()
    def _high_entropies(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """TRL's mask [B, C] of the tokens that are learned, by the quantile over all ranks' tokens. Collective."""
        ids, masks = (
            torch.cat([inputs[f"prompt_{name}"], inputs[f"completion_{name}"]], 1) for name in ("ids", "mask")
        )
        counts = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        found = self._get_per_token_logps_and_entropies(model, ids, masks, counts.shape[1], compute_entropy=True)
        return self.get_high_entropy_mask(found[1], counts, 1 - self.top_entropy_quantile)

    def get_high_entropy_mask(self, entropies: Tensor, mask: Tensor, threshold: float) -> Tensor:
        """TRL's; in a minibatch the pack's part of what was found before, of all ranks' tokens."""
        if isinstance(self.accelerator, Alone):
            return self._entropy_mask
        return super().get_high_entropy_mask(entropies, mask, threshold)

    def _adapt_entropy_coef(self, sums: Mapping[str, float]) -> None:
        """TRL's update of the coefficient at the end of a step, by the mean over all ranks' tokens."""
        args = self.args
        self._last_world_entropy = sums.get("entropy", 0.0) / max(sums.get("entropy_tokens", 0.0), 1.0)
        if self._last_world_entropy <= args.entropy_target:
            self.entropy_coef = min(self.entropy_coef + args.entropy_coef_delta, args.entropy_coef_max)
        else:
            self.entropy_coef = max(self.entropy_coef - args.entropy_coef_delta, args.entropy_coef_min)

    def _loss_of(
        self,
        assigned: AssignedRows,
        shared: Mapping[str, Tensor],
        metrics: PackMetrics,
        coef: float,
        model: nn.Module,
        rows: list[Row],
        terms: Terms,
    ) -> tuple[Tensor, Sums]:
        """TRL's loss of one pack, times its share: [Note: normalisers]."""
        share = metrics.share = self._share(rows, all_rows=assigned.all_rows, all_tokens=terms.number)
        metrics.rows = len(rows)
        self.entropy_coef = coef * in_bonus(rows) / max(assigned.all_in_bonus, 1) / share
        self.router_aux_loss_coef = self._router_weight * len(rows) / assigned.all_rows / share
        batch = batch_of(rows, shared, self.args.device)
        self._entropy_mask = batch.get("entropy_mask")
        self._entropy_window_stats = torch.zeros(2, device=self.args.device)
        loss = share * self.compute_loss(model, batch)
        if not loss.requires_grad:  # no completion of this pack has a token
            loss = loss.detach().requires_grad_()
        return loss, dict(zip(("entropy", "entropy_tokens"), self._entropy_window_stats, strict=True))

    def _share(self, rows: list[Row], *, all_rows: int, all_tokens: int) -> float:
        """The factor of TRL's loss of a pack: [Note: normalisers]."""
        if self.loss_type in _BY_ROWS:
            return len(rows) / all_rows
        if self.loss_type == "bnpo":
            return max(counted(rows), 1) / all_tokens  # without tokens TRL's loss is 0
        return 1.0

    @contextmanager
    def _alone(self) -> Iterator[PackMetrics]:
        """While packs are computed, TRL's loss runs no collective, and its metrics are kept for merging."""
        coef = self.entropy_coef
        try:
            with alone(self, "train") as kept:
                yield kept
        finally:
            self.entropy_coef, self.router_aux_loss_coef = coef, self._router_weight

    def _loop_state(self) -> dict[str, Any]:
        adaptive = {"entropy": [self.entropy_coef, self._last_world_entropy]} if self.use_adaptive_entropy else {}
        return {"grpo_step": self._step} | adaptive

    def _load_loop_state(self, state: dict[str, Any]) -> None:
        """TRL would count from 0, and sample at other steps than the data change."""
        self._step = state["grpo_step"]
        if self.use_adaptive_entropy and "entropy" in state:
            self.entropy_coef, self._last_world_entropy = state["entropy"]
