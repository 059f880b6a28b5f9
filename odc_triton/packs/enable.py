"""`enable_packing`: a transformers model on our attention, after a check that it keeps documents apart.

It registers `packed_attention` (transformers' `AttentionInterface`) and `packed_mask` (its `AttentionMaskInterface`).
For a model without weights, a small one of the same class and config is checked instead.
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..base.environment import needs_transformers
from ..base.untyped import untyped
from ..nn.modes import evaluating
from ..plan.entries import Segment
from ..recurrent.layers import join_documents, recurrent_layers, separate_documents
from .attention import (
    PREPARED_MASK,
    REMEDY,
    PackingUnsupported,
    chooses_keys,
    keep_documents,
    packed_attention,
    packed_mask,
    tell_by_positions,
)
from .images import has_blocks, text_positions
from .rope import follow_documents
from .scores import every_token, give_token_scores, gives_token_scores

ATTENTION_NAME = "odc_packed"


@dataclass(kw_only=True)
class _Seen:
    """Observations of a probe forward of several documents."""

    document: Tensor  # [T]: the document that each token belongs to
    layers: dict[int, nn.Module] = field(default_factory=dict)  # by id, the modules that called the attention
    rotated: list[Tensor] = field(default_factory=list)  # [1, heads, T, D] of each call: queries and keys
    odd_masks: int = 0
    mask_windows: set[int] = field(default_factory=set)
    attention_windows: set[int] = field(default_factory=set)

    def attention(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        self.layers[id(module)] = module
        self.rotated.append(torch.cat(args[:2], dim=1).float())
        if kwargs.get("sliding_window") is not None:
            self.attention_windows.add(kwargs["sliding_window"])
        return packed_attention(module, *args, **kwargs)

    def mask(self, **kwargs: Any) -> Tensor | None:
        token = torch.arange(len(self.document), device=self.document.device)
        behind = token[:, None] - token[None, :]
        same = self.document[:, None] == self.document[None, :]
        expected = same & (behind >= 0)
        if (window := kwargs.get("local_size")) is not None:
            if window > 0:  # else no layer can use it: a token would not see even itself
                self.mask_windows.add(window)
            expected &= behind < window
        always: dict[str, Any] = kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        library: Any = sdpa_mask(**always)  # a mask, in any case
        # Only within documents: some models (GPT-OSS) make masks that join a pack's documents; we separate them.
        self.odd_masks += not torch.equal(library[0, 0] & same, expected)
        return packed_mask(**kwargs)

    def complaint(self, model: nn.Module) -> str | None:
        layers, own = untyped(model).config.get_text_config().num_hidden_layers, recurrent_layers(model)
        if not self.layers and not own:
            return "it never called the configured attention function"
        met = len({getattr(each, "layer_idx", id(each)) for each in (*self.layers.values(), *own)})
        if met + _alone(model) < layers:
            return f"only {met} of its {layers} layers called the attention function"
        if self.odd_masks:
            return "its mask is not plain causal (or causal with a sliding window) within a document"
        if dropped := self.mask_windows - self.attention_windows:
            return f"its masks have windows or chunks of {sorted(dropped)} tokens that its attention does not get"
        return None


def enable_packing(model: nn.Module) -> None:
    """Makes a transformers causal LM attend within the documents of a pack, and checks that it does.

    Call it on the plain model, before `fully_shard`. Probe forwards of 12 tokens, in eval mode, without gradients and
    with the random state kept, show that every layer calls `packed_attention` with the documents' boundaries, that a
    document's logits do not change with its neighbour's tokens, nor its queries and keys with its neighbour's
    positions, also beyond the original length, and (for fp32 weights) that the logits equal those of the former
    attention for the document alone. A vision tower keeps its attention. Recurrent layers of transformers' functions
    get them in their documents' bounds; others, which would carry a state across documents, are refused. For a model on
    the meta device a small one of its class and config is probed, with random weights.

    model: a causal LM; or a sequence classifier on a decoder, whose forward then takes `logits_to_keep` for the scores
        of single tokens.

    Raises PackingUnsupported if a check fails; the former attention is then restored; ValueError for PEFT's prompt
    tuning.
    """
    name, inner = type(model).__name__, innermost(model)
    refuse_prompt_learning(model)
    if not hasattr(model, "set_attn_implementation"):
        raise PackingUnsupported(f"{name} is not a transformers model with a settable attention. {REMEDY}")
    if has_blocks(model) and (needs := needs_transformers("5.6")):  # an older one trains with a mask of its own only
        raise PackingUnsupported(f"{name} {needs}. {REMEDY}")
    if hasattr(text := untyped(model).config.get_text_config(), "index_topk") and (needs := needs_transformers("5.20")):
        raise PackingUnsupported(f"{name} ({text.model_type}), whose indexer chooses keys, {needs}. {REMEDY}")
    if any(parameter.is_meta for parameter in model.parameters()):
        try:
            probed = stand_in(model)
        except Exception as error:
            raise PackingUnsupported(
                f"no small {name} of its config runs ({error!r}): correct its config, such as its heads and hidden "
                f"size; or load its weights first, as it is on the meta device."
            ) from error
        enable_packing(probed)
        _separate(model)
        give_token_scores(inner)
        follow_documents(inner)
        untyped(model).set_attn_implementation(_packed(model.config))
        for name in ("_odc_prepared_mask", "_odc_takes_branches"):
            setattr(inner, name, getattr(innermost(probed), name))
        if tell_by_positions in innermost(probed)._forward_pre_hooks.values():
            inner.register_forward_pre_hook(tell_by_positions, with_kwargs=True)
        return
    give_token_scores(inner)
    former = _implementations(model.config)
    _separate(model)
    device = next(model.parameters()).device
    try:
        # Compiled blocks would keep graphs of the probe's attention.
        with evaluating(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                _probe(model, device)
    except Exception as error:
        untyped(model).set_attn_implementation(former)
        join_documents(inner)
        known = isinstance(error, PackingUnsupported)
        reason = str(error) if known else f"the probe raised {error!r}. {REMEDY}"
        if not known and hasattr(inner, "score") and not gives_token_scores(inner):
            reason = f"it gives a score of each row, and none of single tokens. {REMEDY}"
        raise PackingUnsupported(f"{name} can't be trained on packs: {reason}") from error
    finally:
        _register(packed_attention, packed_mask)


def _separate(model: nn.Module) -> None:
    if chooses_keys(untyped(model).config.get_text_config()):
        innermost(model).register_forward_pre_hook(keep_documents, with_kwargs=True)
    try:
        separate_documents(innermost(model))
    except ValueError as error:
        name = type(model).__name__
        raise PackingUnsupported(f"{name} can't be trained on packs: {error}. {REMEDY}") from error


def refuse_prompt_learning(model: nn.Module) -> None:
    """Raises ValueError for PEFT's prompt, prefix and P-tuning, which put tokens before a row, not before documents."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} is {config.peft_type.value}, whose virtual tokens come before a batch's rows, and a "
                f"pack is one row of several documents: use one within the layers, such as peft.LoraConfig"
            )


def _probe(model: Any, device: torch.device) -> None:
    """Leaves `model` on our attention; raises PackingUnsupported if it does not keep documents apart."""
    inner = innermost(model)
    by_length = follow_documents(inner)  # which a document alone needs too
    first, second = 5, 7  # tokens of the two documents
    vocabulary = model.get_input_embeddings().num_embeddings
    routes = getattr(model.config.get_text_config(), "output_router_logits", False)
    options = {"output_router_logits": False} if routes else {}  # their loss would take the prepared mask for padding
    options |= every_token(inner)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, first + second), generator=generator).to(device)
    other = ids.clone()
    other[:, :first] = (ids[:, :first] + 1) % vocabulary
    positions = torch.cat([torch.arange(first), torch.arange(second)])[None].to(device)

    def logits(ids: Tensor, positions: Tensor, **bounds: Any) -> Tensor:
        positions = text_positions(inner, positions)
        return model(input_ids=ids, position_ids=positions, use_cache=False, **bounds, **options).logits.float()

    # 16-bit arithmetic differs between a pack and a document alone, and may route tokens to other experts.
    full_precision = next(model.parameters()).dtype in (torch.float32, torch.float64)
    tolerance = 1e-4 if full_precision else 2e-2
    documents = (slice(0, first), slice(first, None))
    alone = [logits(ids[:, part], positions[:, part]) for part in documents] if full_precision else []

    seen = _Seen(document=torch.tensor([0] * first + [1] * second, device=device))
    _register(seen.attention, seen.mask)
    model.set_attn_implementation(_packed(model.config))
    packed, changed = logits(ids, positions), logits(other, positions)
    complaint = seen.complaint(model)
    scale = packed.abs().max()
    # Negated comparisons, so that NaN fails too.
    if complaint is None and not (packed - changed)[:, first:].abs().max() <= tolerance * scale:
        complaint = "a document's logits changed when only its neighbour's tokens did"
    if complaint is None and full_precision and not (packed - torch.cat(alone, dim=1)).abs().max() <= 1e-3 * scale:
        complaint = "its logits in a pack are not those of each document alone"
    if complaint is None and not _keeps_positions_apart(model, seen, lambda at: logits(ids, at), first, tolerance):
        complaint = "a document's queries and keys changed when only its neighbour's positions did"
    if complaint is not None:
        raise PackingUnsupported(f"{complaint}. {REMEDY}")
    ends = torch.tensor([0, first, first + second], dtype=torch.int32, device=device)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": second, "max_length_k": second}
    bounds["attention_mask"] = torch.empty(PREPARED_MASK, dtype=torch.bool, device=device)
    inner._odc_prepared_mask = False
    with contextlib.suppress(Exception):  # it then makes its own mask
        prepared = logits(ids, positions, **bounds)
        inner._odc_prepared_mask = bool((packed - prepared).abs().max() <= tolerance * scale)
    # By length, what samples share has other rotary frequencies in a longer one.
    takes = not by_length and _probe_branches(logits, ids, tolerance)
    if not takes:
        told = inner.register_forward_pre_hook(tell_by_positions, with_kwargs=True)
        takes = not by_length and _probe_branches(logits, ids, tolerance)
        if not takes and not by_length:
            told.remove()
    inner._odc_takes_branches = takes


def _keeps_positions_apart(model: Any, seen: _Seen, run: Callable[[Tensor], Any], first: int, tolerance: float) -> bool:
    """True if a document, the `first` tokens, has the same queries and keys before, together with and after one that
    is longer than any length in the config. `run`: a forward with these positions, which stay below a table's end.
    """
    config = str(model.config.get_text_config().to_dict())
    lengths = [*map(int, re.findall(r"max_position_embeddings': (\d+)", config))]
    parts, count, far, found = [*model.modules()], len(seen.document), max(lengths, default=64), []
    tables = sum(isinstance(each, nn.Embedding) for each in parts) > 1 or any(each.ndim > 1 for each in model.buffers())
    if (tables or seen.document.is_cuda) and not any(hasattr(each, "rope_type") for each in parts):
        far = max(far + first - count, 0)
    own, other = torch.arange(first) + max(min(lengths, default=64) - 1 - first, 0), torch.arange(count - first)
    for start in (0, far, 0):
        seen.rotated.clear()
        run(torch.cat([own, other + start])[None].to(seen.document.device))
        found.append([each[:, :, :first] for each in seen.rotated])
    pairs = (pair for others in found[1:] for pair in zip(found[0], others, strict=True))
    return all(bool((one - two).abs().max() <= tolerance * one.abs().max()) for one, two in pairs)


def _alone(model: Any) -> int:
    """The layers that compute each token alone."""
    kinds = getattr(model.config.get_text_config(), "layers_block_type", None) or []
    return sum(kind in ("mlp", "moe") for kind in kinds)


def _probe_branches(logits: Callable[..., Tensor], ids: Tensor, tolerance: float) -> bool:
    """True if a document that branches from another at token 4 has the same logits as without sharing. `ids`: of one
    document; `logits`: of ids and positions, by the model.
    """
    _register(packed_attention, packed_mask)
    length, start = ids.shape[1], 4
    ends = torch.tensor([0, length, 2 * length - start], dtype=torch.int32, device=ids.device)
    bounds = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}
    segments = (Segment(0, 0, length), Segment(1, start, length, parent=0))
    positions = torch.arange(length, device=ids.device)[None]
    wanted = logits(ids, positions)
    with contextlib.suppress(Exception):
        both = (torch.cat([each, each[:, start:]], dim=1) for each in (ids, positions))
        found = logits(*both, segments=segments, **bounds)
        return bool((found[:, length:] - wanted[:, start:]).abs().max() <= tolerance * wanted.abs().max())
    return False


def innermost(model: nn.Module) -> Any:
    """The model inside DistributedDataParallel and PEFT, which hide its signature and attributes. Any: of its class."""
    inner: Any = getattr(model, "module", model)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def is_packed(model: nn.Module) -> bool:
    """True if the model attends by `packed_attention`."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == ATTENTION_NAME


def refuse_unpacked(model: nn.Module, name: str = "the model") -> None:
    """Raises ValueError unless the model, inside of wrappers, attends by `packed_attention`."""
    if not is_packed(innermost(model)):
        raise ValueError(
            f"{name}'s attention does not keep a pack's documents apart: call odc_triton.hf.enable_packing before "
            f"fully_shard"
        )


def takes_prepared_mask(model: nn.Module) -> bool:
    """True if a forward on a pack with bounds may get a prepared mask; see [Note: a prepared mask]."""
    return is_packed(model) and getattr(model, "_odc_prepared_mask", False)


def takes_branches(model: nn.Module) -> bool:
    """True if samples of a pack may share prefixes."""
    return is_packed(model) and getattr(model, "_odc_takes_branches", False)


def _register(attention: Callable, mask: Callable) -> None:
    """Registers the functions as ATTENTION_NAME, in place of former ones."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)


def _implementations(config: Any) -> str | dict[str, Any]:
    """The attention of a config and its sub-configs, as `set_attn_implementation` takes them."""
    parts = {key: part for key in config.sub_configs if (part := getattr(config, key, None)) is not None}
    if not parts:
        return config._attn_implementation
    return {"": config._attn_implementation} | {key: _implementations(part) for key, part in parts.items()}


def _packed(config: Any) -> str | dict[str, Any]:
    """Our attention for the text, as `set_attn_implementation` takes it; a vision tower keeps its own."""
    given, text = _implementations(config), config.get_text_config()
    if isinstance(given, str):
        return ATTENTION_NAME
    ours = {key: ATTENTION_NAME for key in given if key and getattr(config, key) is text}
    return given | {"": ATTENTION_NAME} | ours


_HEAD_WIDTHS = ("num_attention_heads", "num_key_value_heads", "hidden_size")
_VOCABULARY = 64


def stand_in(model: nn.Module) -> nn.Module:
    """A small model on the CPU, in eval mode, for a transformers model without weights. The random state is kept.

    It has each kind of layer of `config.layer_types` (at least two layers), a vocabulary of 64, and one layer of any
    other part, such as a vision tower. If the config has plain heads it has few of them, as wide and grouped as the
    model's; if such a model can't be made, layers of full width. Raises the errors of the model's class if neither can.
    """
    error: Exception | None = None
    for narrow in (True, False):
        config: Any = copy.deepcopy(model.config)
        text = config.get_text_config()
        for other in (getattr(config, name, None) for name in config.sub_configs):
            for name in ("num_hidden_layers", "depth") if other is not None and other is not text else ():
                if isinstance(getattr(other, name, None), int):
                    setattr(other, name, 1)
        for part in {id(each): each for each in (config, text)}.values():
            _shorten(part)
            if narrow:
                _narrow(part)
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about our sizes
                made = type(model)(config).float().eval()
                made(input_ids=torch.arange(4)[None], use_cache=False)
            return made
        except Exception as raised:  # a class may refuse odd sizes with any error
            error = raised
    raise error


def _shorten(config: Any) -> None:
    layers = getattr(config, "num_hidden_layers", None)
    if not isinstance(layers, int):
        return
    kinds = getattr(config, "layer_types", None)
    few = min(layers, 2)
    if isinstance(kinds, list):
        few = max(few, *(kinds.index(kind) + 1 for kind in set(kinds)))
    # As many layers again, where the last ones attend to keys and values of the first (Gemma 3n).
    times = 2 if (shares := getattr(config, "num_kv_shared_layers", 0)) else 1
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:few] * times)
    config.num_hidden_layers = few * times
    if shares:
        config.num_kv_shared_layers = few
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if isinstance(size := getattr(config, name, None), int):
            setattr(config, name, min(size, _VOCABULARY))
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        with contextlib.suppress(StrictDataclassFieldValidationError):  # CWM's bos_token_id is a number
            setattr(config, token, None)


def _narrow(config: Any) -> None:
    sizes: list[Any] = [getattr(config, name, None) for name in _HEAD_WIDTHS]
    heads, groups, width = sizes
    if not all(isinstance(each, int) for each in sizes) or heads % groups or width % heads:
        return
    few = max(1, 2 // (heads // groups))  # heads of keys and values; two heads of queries or more
    config.num_key_value_heads = few = min(few, groups)
    config.num_attention_heads = few * (heads // groups)
    config.hidden_size = config.num_attention_heads * (width // heads)
    for name, most in (("intermediate_size", 64), ("moe_intermediate_size", 32)):
        inner = getattr(config, name, None)  # Gemma 3n has one of each layer, Solar-Open none
        if isinstance(inner, int):
            setattr(config, name, min(inner, most))
        elif isinstance(inner, list):
            setattr(config, name, [min(each, most) for each in inner])
