"""Peak memory within a step: unsharded parameters, whole gradients, activations.

`Units`: the bytes of each unit's whole parameters, or of their gradients, by the unit's name; the root is one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...plan.decoder import is_hybrid
from .traced import traced_bytes_per_token

if TYPE_CHECKING:
    from torch import nn

    from ...plan.decoder import Decoder

ROOT = ""  # the unit of every parameter outside all blocks, as in comm/layout.py
Units = dict[str, int]


def _largest(units: Units, *others: Units) -> int:
    """Of the blocks, with what `others` has of the same block."""
    return max((sum(of[name] for of in (units, *others)) for name in units if name != ROOT), default=0)


def gathered_bytes(units: Units) -> int:
    """Unsharded parameters: the root's stay for the whole pass, blocks go through two buffers."""
    return units[ROOT] + min(2, len(units) - 1) * _largest(units)


def whole_gradient_bytes(units: Units, *, tied: int) -> int:
    """ODC adds a gradient to its owners as soon as autograd has made it: one is alive, or up to a whole unit's.

    A unit's are counted. The first part of a `tied` parameter's gradient waits for the second use: counted on top.
    """
    return tied + max(units.values())


def fsdp2_whole_gradient_bytes(
    made: Units, reduced: Units, *, late_root: int, resharded: bool, gathered_bytes: int, shard_bytes: int
) -> int:
    """Bytes that FSDP2's whole gradients add to its unsharded parameters and gradient shards at the peak.

    `made`, `reduced`: gradients in the compute and in the reduce dtype. `late_root`: in the compute dtype, of the
    root's parameters that get their gradients before a block does (head, last norm, tied ones). `resharded`: blocks are
    resharded after forward, and each microbatch syncs. `gathered_bytes`, `shard_bytes`: what it adds to.

    FSDP2 holds a unit's gradients until the last one is there, frees the unit's parameters, then copies the gradients
    into the reduce-scatter's input, in the reduce dtype (its _fsdp_param_group.py, `post_backward`). So while blocks
    run backward, the late root's gradients are alive too; when the root itself is reduced, nothing is unsharded any
    more. Without a sync per microbatch the whole model's gradients add up unsharded in the reduce dtype, and shards
    appear only as these are freed.
    """
    if resharded:
        return max(late_root + _largest(made, reduced), made[ROOT] + reduced[ROOT] - gathered_bytes)
    in_microbatch = max(made[ROOT], late_root + _largest(made))
    return max(0, sum(reduced.values()) + in_microbatch - shard_bytes)


def text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def activation_bytes_per_token(
    model: nn.Module, *, itemsize: int, gradient_checkpointing: bool = False, split: bool = False
) -> int | None:
    """Estimate of the bytes kept for backward per token, in a transformers decoder run eagerly.

    Counts as Korthikanti et al. 2022 do ("Reducing Activation Recomputation in Large Transformer Models",
    arXiv 2205.05198, section 4.1), adapted to what Llama, Mistral, Qwen2 and Qwen3 of transformers save:
    RMSNorm in fp32, grouped key/value heads, SwiGLU, no dropout, and no attention scores, which SDPA and
    flash attention do not store. With hidden size h, `a` query and `g` key/value heads of size d, inner size
    i and e = `itemsize` bytes per element, a layer keeps

        2 (h (4 + 2e) + 4)             two norms: fp32 input, normalised input, output; reciprocal root
      + e (2 a d + 2 g d) + 4 a        q, k, v and attention's output; log-sum-exp
      + (a + g) (d (4 + e) + 4)        with q/k norms (Qwen3): as above, their outputs being q and k
      + 4 e i                          gate, SiLU(gate), up, product

    With gradient checkpointing each layer keeps its input (e h) and one layer is recomputed at a time. Once
    per token: the last norm, the logits and their fp32 log-probabilities (vocabulary times e + 4). Layers with
    frozen weights keep less. Of hybrids the peak is traced (traced.py). None for other models: other MLPs, mixtures of
    experts, not a transformer.
    """
    config = text_config(model)
    modules = [name for name, _ in model.named_modules()]
    if is_hybrid(config):
        if any(name.endswith(".experts") for name in modules):
            return None
        return traced_bytes_per_token(config, itemsize=itemsize, checkpointing=gradient_checkpointing, split=split)
    layers = getattr(config, "num_hidden_layers", 0)
    gated = sum(name.endswith((".mlp.gate_proj", ".mlp.gate_up_proj")) for name in modules)
    if not layers or gated != layers or getattr(config, "hidden_act", None) != "silu":
        return None
    head_norms = any(name.endswith(".q_norm") for name in modules)
    h, a, e = config.hidden_size, config.num_attention_heads, itemsize
    g = getattr(config, "num_key_value_heads", None) or a
    d = getattr(config, "head_dim", None) or h // a
    norm = h * (4 + 2 * e) + 4
    layer = 2 * norm + e * (2 * a * d + 2 * g * d) + 4 * a + 4 * e * config.intermediate_size
    if head_norms:
        layer += (a + g) * (d * (4 + e) + 4)
    kept = layers * e * h + layer if gradient_checkpointing else layers * layer
    return kept + norm + config.vocab_size * (e + 4)


def long_bytes_per_token(
    model: nn.Module, decoder: Decoder, *, itemsize: int, sum_itemsize: int, offloaded: bool
) -> int:
    """Bytes at the peak of a microbatch with segments of samples, per token: in the backward of a checkpointed layer's
    attention. MLPs and norms are in chunks, and the head is fused, so they hold less. With e = `itemsize`, s =
    `sum_itemsize`, hidden size h, A and G the widths of all queries and of all keys, d that of one:

        e h layers                  checkpoints, with `offloaded` two of them
      + e (3 h + 2 A + 2 G)         the first norm's output, the sum after attention and its gradient; q, k, v, output
      + e (A + G)                   with q/k norms: their inputs
      + e A + s (A + 2 G)           gradients of the output, and sums of those of q, k and v
      + e (A / 2 + 2 G)             gradients by one call, for one of two segments
      + 2 e d + 4 heads             cosines and sines; log-sum-exp
    """
    config = text_config(model)
    h, queries, keys = config.hidden_size, decoder.heads * decoder.key_width, decoder.kv_heads * decoder.key_width
    kept = (2 if offloaded else decoder.layers) * h + 3 * h + 2 * (queries + keys) + queries + 2 * decoder.key_width
    if any(name.endswith(".q_norm") for name, _ in model.named_modules()):
        kept += queries + keys
    kept += queries // 2 + 2 * keys
    return itemsize * kept + sum_itemsize * (queries + 2 * keys) + 4 * decoder.heads


def read_bytes(decoder: Decoder, *, tokens: int, itemsize: int, sum_itemsize: int, apart: bool) -> int:
    """What attention holds of other ranks' rows, `tokens` at a time: their gradients; where memory is `apart` also two
    copies of rows, one of them for the next call, and gradients that are being added.
    """
    row = decoder.kv_heads * (decoder.key_width + decoder.value_width)
    return tokens * row * (2 * itemsize + 2 * sum_itemsize if apart else sum_itemsize)
