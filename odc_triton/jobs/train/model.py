"""The model of a job before `fully_shard`: packing, replaced layers, adapters by PEFT."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.modeling_layers import GenericForSequenceClassification

from ...base.environment import quiet_bitsandbytes
from ...checkpoint import meta_causal_lm, with_adapter
from ...comm.layout import find_units
from ...optim import adamw8bit
from ...packs.attention import PackingUnsupported, attend_outside_of_graphs
from ...packs.chunks import compute_in_chunks
from ...packs.enable import enable_packing, innermost, takes_branches
from ...packs.images import TOWER, tower_of
from ...packs.loss import refuse_router_loss
from ...plan.cost import CostModel
from ..options.options import flag
from .pairs_options import RewardOptions
from .run_options import RunOptions
from .sft_options import SftOptions


def build_model(
    options: RunOptions, tokenizer: Any, *, longest: int, largest_token: int, rank: int, memory_bytes: int = 0
) -> tuple[nn.Module, CostModel]:
    """The model before `fully_shard`, without weights, and the cost of its samples.

    `longest`: tokens of the longest sample; `memory_bytes`: of the GPU that computes, 0 on CPUs. Raises ValueError for
    samples that the model can't take, and PackingUnsupported.
    """
    torch.manual_seed(options.seed)
    scores = isinstance(options, RewardOptions)
    model = meta_causal_lm(model=options.model, init=options.init, scores=scores)
    if scores and not isinstance(model, GenericForSequenceClassification):
        raise ValueError(
            f"{options.architecture}: {type(model).__name__} has no scores of single tokens, which train "
            f"reward needs: give a decoder whose sequence classifier is transformers' generic one"
        )
    if options.quantize is not None:
        quantise(model, options.quantize, options.dtype)
    name_special_tokens(model, tokenizer)
    check_fit(model, longest, largest_token, remedy=options.shortens)
    cost = CostModel.from_config(model.config.get_text_config())
    try:
        enable_packing(model)
    except PackingUnsupported as error:
        raise PackingUnsupported(f"{options.architecture}: {error}") from error
    if isinstance(options, SftOptions):
        weigh_routers(model, options)
    if options.needs_branches and not takes_branches(innermost(model)):
        raise PackingUnsupported(
            f"--share-prefixes: {type(model).__name__} does not pass on to its attention what samples of a pack share, "
            f"or has rope by length: leave it out"
        )
    recomputes, why = recomputes_activations(model.config, options, memory_bytes)
    if why and rank == 0:
        print(why, flush=True)
    if recomputes:
        # Its newer name warns of the older one.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model = adapt(model, options, rank)
    if options.split_sequences:
        compute_in_chunks(model)
    return model.train(), cost


def adapt(model: nn.Module, options: RunOptions, rank: int) -> nn.Module:
    """Freezes what the options say, adds their adapters and replaces layers."""
    tower = tower_of(model)
    if options.freeze_vision_tower and not tower:
        raise ValueError(f"--freeze-vision-tower: {type(model).__name__} has no vision tower: leave it out")
    if options.lora_rank:
        model = add_adapters(model, **adapters_of(asdict(options) | {"job": options.job}))
    elif options.freeze_vision_tower:
        for parameter in tower:
            parameter.requires_grad = False
    # After the adapters, so that it reports attention layers that they keep from fusing.
    wants_head = options.split_sequences or options.teacher is not None
    replace(model, options, rank, try_head=wants_head and options.fused_head is None)
    return model


def recomputes_activations(config: Any, options: RunOptions, memory_bytes: int) -> tuple[bool, str]:
    """Whether gradient checkpointing is on, and why, if the options don't say so.

    By default on a GPU, if a pack's activations would take more than a quarter of its memory. In bf16 a layer keeps
    about 60 bytes for each token and element of the hidden size: see `activation_bytes_per_token` in tools/memory.
    """
    if options.gradient_checkpointing is not None or not memory_bytes:
        return bool(options.gradient_checkpointing), ""
    text = config.get_text_config()
    per_token = 60 * getattr(text, "hidden_size", 0) * getattr(text, "num_hidden_layers", 0)
    n_bytes = per_token * options.token_cap * (1 if options.dtype == "bf16" else 2)
    if n_bytes <= memory_bytes / 4:
        return False, ""
    return True, (
        f"activations are recomputed in the backward, as those of a pack would take about {n_bytes / 1e9:.3g} of the "
        f"GPU's {memory_bytes / 1e9:.3g} GB; --no-gradient-checkpointing turns it off"
    )


def compile_blocks(model: nn.Module, backend: str | Callable = "inductor") -> None:
    """Compiles each block, for packs of any length. Attention is outside of the graphs: its documents differ.

    A checkpointed layer is compiled in parts, as its call, with the checkpoint inside, can't be left for attention.
    """
    for name in find_units(innermost(model)):
        attend_outside_of_graphs(block := innermost(model).get_submodule(name))
        for part in block.children() if getattr(block, "gradient_checkpointing", False) else [block]:
            part.compile(backend=backend, dynamic=True)


def quantise(model: nn.Module, method: str, dtype: str | None) -> None:
    """`checkpoint.quantise.quantise_on_meta` by a run's options. Raises ImportError without bitsandbytes."""
    adamw8bit.functional(needed_by="--quantize")
    from ...checkpoint.quantise import quantise_on_meta

    quantise_on_meta(model, method, torch.bfloat16 if dtype == "bf16" else torch.float32)


def weigh_routers(model: nn.Module, options: SftOptions) -> None:
    """Writes `router_aux_loss` into the config. Raises ValueError for other models, and for segments of samples."""
    config, weight = model.config.get_text_config(), options.router_aux_loss
    if weight is not None:
        if weight and not hasattr(config, "router_aux_loss_coef"):
            raise ValueError(f"--router-aux-loss: {type(model).__name__} has no router's auxiliary loss: leave it out")
        config.output_router_logits, config.router_aux_loss_coef = weight > 0, weight
    for name in ("split_sequences", "share_prefixes"):
        if getattr(options, name):
            refuse_router_loss(model, f"a mean over full samples: leave {flag(name)} out, or give --router-aux-loss 0")


def frozen_options(options: RunOptions, model: str | None = None) -> RunOptions:
    """The options of a model that is only read: `model`, or the run's own before it gets adapters."""
    changes: dict[str, Any] = {"lora_rank": 0, "lora_alpha": None, "lora_targets": "all-linear", "expert_cache": 0}
    if model is not None:
        changes |= {"model": model, "init": None, "quantize": None, "tokenizer": options.tokenizer or options.model}
    if isinstance(options, SftOptions):
        changes["router_aux_loss"] = 0.0
    return dataclasses.replace(options, freeze_vision_tower=False, **changes)


def name_special_tokens(model: nn.Module, tokenizer: Any) -> None:
    """Gives the model's configs the tokenizer's special tokens that they lack: `generate` stops at the end token, and a
    classifier scores the last token that is no padding, without which transformers takes one text at a time.
    """
    for config in (model.config.get_text_config(), getattr(model, "generation_config", None)):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if config is not None and getattr(config, name, None) is None:
                setattr(config, name, getattr(tokenizer, name, None))
    if isinstance(model, GenericForSequenceClassification) and model.config.get_text_config().pad_token_id is None:
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = tokenizer.eos_token_id


def precision(dtype: str | None) -> MixedPrecisionPolicy | None:
    """For "bf16", compute in bf16; masters and sums of gradients are fp32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16) if dtype == "bf16" else None


def replace(model: nn.Module, options: Any, rank: int, *, try_head: bool = False) -> None:
    """Replaces the layers that the options, of a run or a profile, name; with `try_head` also a head that can be fused.

    Raises ValueError for a head that can't be fused and is named, and for a cache of experts that it has not.
    """
    wants_head = options.fused_head or try_head
    if not (options.replace_layers or wants_head):
        return
    from ...nn.replace import DEFAULT_ROLES, HEAD, replace_layers

    roles = [*(DEFAULT_ROLES if options.replace_layers else ()), *([HEAD] if wants_head else ())]
    replaced = replace_layers(model, roles=roles, verbose=rank == 0 and (options.replace_layers or not try_head))
    if getattr(options, "expert_cache", 0) and not replaced.swapped.get("experts"):
        raise ValueError(f"--expert-cache: {options.architecture} has no experts to replace; leave it out")
    if not wants_head or replaced.swapped[HEAD]:
        return
    why = "; ".join(f"{name}: {why}" for name, why in replaced.left.items())
    if options.fused_head:
        raise ValueError(f"--fused-head: {options.architecture} has a head that can't be fused ({why}); leave it out")
    if rank == 0 and not options.replace_layers:  # which has said it
        print(f"logits are computed whole, as the head can't be fused ({why})", flush=True)


def check_fit(model: nn.Module, longest: int, largest_token: int, *, remedy: str) -> None:
    """Raises ValueError for samples that the model can't take: unknown tokens, or too many for its positions.

    `remedy`: the options that shorten samples.
    """
    config = model.config.get_text_config()
    if largest_token >= config.vocab_size:
        raise ValueError(
            f"the tokenizer made token {largest_token} and the model has only {config.vocab_size} (vocab_size): give "
            f"the model's own --tokenizer, or a larger vocab_size in --init"
        )
    places = getattr(config, "max_position_embeddings", None)
    if places is not None and longest > places:
        raise ValueError(
            f"the longest sample has {longest} tokens and the model takes at most {places} "
            f"(max_position_embeddings): lower --token-cap and give {remedy}"
        )


def require_peft() -> Any:
    """The peft package. Raises ImportError with the remedy."""
    quiet_bitsandbytes()
    try:
        import peft
    except ImportError as error:
        raise ImportError('--lora-rank needs peft; run: pip install "odc-triton[peft]"') from error
    return peft


def adapters_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `add_adapters` in a run's options, or in its identity, which may be of an older version."""
    return {
        "rank": options["lora_rank"],
        "alpha": options["lora_alpha"],
        "targets": options["lora_targets"],
        "without": TOWER if options.get("freeze_vision_tower") else None,
        "scores": options.get("job") == RewardOptions.job,
    }


def ties_head(model: nn.Module) -> bool:
    """True if a model's head is its embedding, which only its config says of one that is sharded."""
    config = innermost(model).config
    return all(getattr(each, "tie_word_embeddings", True) for each in (config, config.get_text_config()))


def add_adapters(
    model: nn.Module,
    *,
    rank: int,
    alpha: float | None,
    targets: str,
    without: str | None = None,
    scores: bool = False,
) -> nn.Module:
    """The transformers model inside PEFT's wrapper, with adapters; the rest is frozen, but for a classifier's score.

    `targets`: "all-linear", or names of layers with commas between. `without`: a pattern of the whole names of layers
    that get none. `scores`: the model is a sequence classifier. Raises ImportError without peft, ValueError for
    names that no layer has.
    """
    peft = require_peft()
    names = [name.strip() for name in targets.split(",") if name.strip()]
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules="all-linear" if names == ["all-linear"] else names,
        exclude_modules=without,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks for what transformers has renamed
            return with_adapter(model, config)
    except NotImplementedError as error:
        raise ValueError(f"--lora-rank: {error}") from error
    except ValueError as error:
        linear = {name.rpartition(".")[2]: None for name, each in model.named_modules() if isinstance(each, nn.Linear)}
        raise ValueError(
            f"--lora-targets {targets}: {error} This model's linear layers: {', '.join(linear)}"
        ) from error
