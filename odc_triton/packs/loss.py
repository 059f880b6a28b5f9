"""A pack's loss, and the model's inputs for it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..nn.head import FusedLogits, divergence
from ..nn.modes import evaluating
from ..plan.fields import IGNORED, IMAGE_FIELDS, TOKEN_TYPES
from .attention import PREPARED_MASK
from .enable import innermost, is_packed, refuse_prompt_learning, takes_branches, takes_prepared_mask
from .images import image_inputs, sees_images
from .router_loss import router_losses, router_weight

NO_ROUTER_LOSS = "set model.config.output_router_logits = False"
TAKEN = ("input_ids", "attention_mask", "position_ids", "labels", *IMAGE_FIELDS)  # of a sample
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def model_inputs(pack: Mapping[str, Any], model: nn.Module | None = None) -> dict[str, Any]:
    """The inputs of a training forward of `pack`: its ids, positions and segments; its images, as `model` takes them;
    its cumulative lengths if it has them (`cu_seq_lens_q`, `max_length_q`, ..., transformers' names) and `model`, if
    given, takes them; and no cache, which would hold every layer's keys and values unused.

    pack: of `pack_collate`.
    model: after `enable_packing`. Where it can, its packs come with an empty mask of four dimensions, so that
        transformers does not look for documents, which would synchronise with the device.

    Raises RuntimeError for segments of samples on a `model` with another attention, which would ignore them, and
    ValueError for images on a model of a kind that is not supported, and for the model's other inputs.
    """
    if model is not None and "segments" in pack and not is_packed(innermost(model)):
        raise RuntimeError(
            "this pack holds segments of samples, and the model's attention would treat each as a full sample: call "
            "odc_triton.hf.enable_packing(model) before fully_shard, and enable_split(model, tokens=…) after it"
        )
    branch = next((each for each in pack.get("segments", ()) if each is not None and each.parent is not None), None)
    if model is not None and branch is not None and not takes_branches(innermost(model)):
        raise RuntimeError(
            f"in this pack {branch} share a prefix with sample {branch.parent}, and {type(innermost(model)).__name__} "
            f"does not pass segments to odc_triton's packed attention, or has rope by length: train without shared "
            f"prefixes"
        )
    if model is not None and (more := untaken(model) & pack.keys() - {*_BOUNDS}):
        raise ValueError(f"the pack has {', '.join(sorted(more))}, inputs that packs have no place for: leave them out")
    bounds = _BOUNDS if model is None or _takes_bounds(model) else ()
    names = ("input_ids", "position_ids", "segments", *bounds)
    inputs: dict[str, Any] = {name: pack[name] for name in names if name in pack} | {"use_cache": False}
    if model is not None:
        inputs |= image_inputs(innermost(model), pack, packed=is_packed(innermost(model)))
    if model is not None and all(name in inputs for name in _BOUNDS) and takes_prepared_mask(innermost(model)):
        inputs["attention_mask"] = inputs["input_ids"].new_empty(PREPARED_MASK, dtype=torch.bool)
    return inputs


def untaken(model: nn.Module) -> frozenset[str]:
    """The inputs that plain transformers would pass to the model from a data set, and packs have no place for."""
    types = TOKEN_TYPES if sees_images(innermost(model)) else ()
    return frozenset(_parameters(model)) - {*TAKEN, *types} | {"label_ids"}


def _parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of the model's forward."""
    return inspect.signature(innermost(model).forward).parameters


def _takes_bounds(model: nn.Module) -> bool:
    parameters = _parameters(model)
    return _BOUNDS[0] in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def summed_loss(model: nn.Module, pack: Mapping[str, Any]) -> Tensor:
    """Cross-entropy summed over the pack's target tokens, a scalar in fp32; 0 without targets.

    Token t is predicted from position t - 1; labels of -100 are no targets. Divide by all ranks' number of targets
    before `backward()`. The head runs on the predicting positions only, if the model's forward takes `logits_to_keep`
    (transformers' causal LMs do): logits then cost memory by target, not by token.

    model: a causal LM of transformers. For packs of several documents call `enable_packing(model)` first.
    pack: of `pack_collate`. On a GPU, one without `target_positions` makes the host wait for the device to find them.

    Raises ValueError if `labels` is not [1, T], for PEFT's prompt tuning, and for a model whose config has a router's
    auxiliary loss, which `summed_losses` returns too.
    """
    refuse_router_loss(model, f"which this leaves out: call odc_triton.hf.summed_losses, or {NO_ROUTER_LOSS}")
    logits, targets = predictions(model, pack)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def distillation_loss(
    model: nn.Module, teacher: nn.Module, pack: Mapping[str, Any], *, beta: float = 0.5, temperature: float = 1.0
) -> Tensor:
    """The divergence of `model` from `teacher` summed over the pack's target tokens: a scalar in fp32.

    Call it in `minibatch(model)` and divide by all ranks' number of targets, as with `summed_loss`. With fused heads
    in both neither's logits are ever computed.

    model: what `fully_shard` returned.
    teacher: is sharded over the same ranks and read on demand: it needs no minibatch. It computes in evaluation mode,
        without gradients, and may be `model` itself.
    pack: of `pack_collate`.
    beta, temperature: as in `odc_triton.divergence`.

    Raises ValueError as `odc_triton.divergence` and `summed_loss`.
    """
    refuse_router_loss(model, f"which this leaves out: {NO_ROUTER_LOSS}")
    logits, _ = predictions(model, pack)
    return divergence(logits, frozen_logits(teacher, pack), beta=beta, temperature=temperature).sum()


@torch.no_grad()
def frozen_logits(model: nn.Module, pack: Mapping[str, Any]) -> Tensor | FusedLogits:
    """Logits of the pack's targets by a model that is only read: in evaluation mode, but for a fused head's."""
    with evaluating(model, but=innermost(model).get_output_embeddings()):
        return predictions(model, pack)[0]


def summed_losses(model: nn.Module, pack: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """`summed_loss`, and the sum of the routers' auxiliary losses of the pack's samples: scalars in fp32.

    The second is 0 if the model's config has none. It is to be divided by the samples of all ranks:

        with minibatch(model, tokens=count_target_tokens(packs)) as mb:
            for pack in packs:
                loss, router = summed_losses(model, pack)
                (loss / mb.tokens + 0.001 * router / packs.samples).backward()

    `packs.samples`: of all ranks in the minibatch; what a MinibatchSampler yields has it, and `pack_collate` keeps it.

    Raises ValueError as `summed_loss`, for a model without routers' logits, and for packs with segments of samples.
    """
    logits, targets, router = router_predictions(model, pack, bool(router_weight(model)))
    return F.cross_entropy(logits.float(), targets, reduction="sum"), router


def refuse_router_loss(model: nn.Module, instead: str) -> None:
    """Raises ValueError for a model with a router's auxiliary loss. `instead`: why it can't be, and what to do."""
    if weight := router_weight(model):
        raise ValueError(
            f"{type(innermost(model)).__name__} adds a router's auxiliary loss (output_router_logits=True, "
            f"router_aux_loss_coef={weight}), {instead}"
        )


def predictions(model: nn.Module, pack: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits and targets of the pack's n target tokens, in their order.

    The logits may be a fused head's, which `cross_entropy` and `odc_triton.log_probs` take. A router's auxiliary loss
    is not computed.

    model, pack: as in `summed_loss`.

    Returns (logits [n, V], targets [n]). Raises ValueError if `labels` is not [1, T], and for PEFT's prompt tuning.
    """
    refuse_prompt_learning(model)
    shifted = "shift_labels" in pack
    labels = pack["shift_labels" if shifted else "labels"]
    if labels.ndim != 2 or labels.shape[0] != 1:
        raise ValueError(f"A pack is one row, [1, T], but labels are {list(labels.shape)}: loop over the rows.")
    labels = labels[0] if shifted else labels[0, 1:]  # of the token after each position
    positions = pack.get("target_positions")  # those that predict a target
    if positions is None:
        positions = (labels != IGNORED).nonzero().flatten()
    inputs = model_inputs(pack, model)
    if router_weight(model):
        inputs["output_router_logits"] = False  # else it would compute its own loss, of the whole pack
    if "logits_to_keep" in _parameters(model):
        logits = model(**inputs, logits_to_keep=positions).logits
    else:
        logits = model(**inputs).logits[:, positions]
    return logits[0], labels[positions]


def router_predictions(model: nn.Module, pack: Mapping[str, Any], wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`predictions`, and the sum of the routers' auxiliary losses of the pack's samples; 0 unless `wanted`."""
    layers: list[Tensor] = []
    body, asked = innermost(model).base_model, {"output_router_logits": True}
    hooks = wanted and (  # only the body, without the head, is asked for them
        body.register_forward_pre_hook(lambda _, args, given: (args, given | asked), with_kwargs=True),
        body.register_forward_hook(lambda _, args, output: layers.extend(output.get("router_logits") or ())),
    )
    try:
        logits, targets = predictions(model, pack)
    finally:
        for hook in hooks or ():
            hook.remove()
    router = router_losses(model, layers, pack).sum() if wanted else torch.zeros((), device=targets.device)
    return logits, targets, router
