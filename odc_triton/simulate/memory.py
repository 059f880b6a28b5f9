"""Bytes on the fullest GPU: the sums of `footprint.memory_plan` from a model's sizes alone, nodes included.

bf16 compute, fp32 masters, gradients and AdamW states, as there; tests hold the two against each other. Left out, less
than a hundredth: norms, biases, alignment, rows that don't divide evenly.
"""

from __future__ import annotations

from .models import Model

_COMPUTE, _FULL = 2, 4  # bytes per element
_STATES = 2 * _FULL


def state_bytes(model: Model, schedule: str, *, shards: int, ranks: int) -> int:
    """What lies there between minibatches, and at most within one beside activations, per GPU.

    `shards`: GPUs that hold one copy of the parameters together, `ranks` where nodes hold none of their own. ODC then
    still deals masters and optimizer states over all `ranks`; FSDP2 keeps them with the shards.
    """
    p, block, root, table = model.parameters, model.block_parameters, model.root_parameters, model.largest_parameter
    gathered = _COMPUTE * (root + min(2, model.layers) * block)
    if schedule == "odc":
        whole_gradients = _COMPUTE * max(root, block) + (_COMPUTE * table if root == table else 0)  # tied: once more
        return -(-(_COMPUTE + _FULL) * p // shards) + -(-(_FULL + _STATES) * p // ranks) + gathered + whole_gradients
    sharded = -(-(2 * _FULL + _STATES) * p // shards)
    late_root = _COMPUTE * table
    if schedule == "fsdp":
        in_blocks = late_root + (_COMPUTE + _FULL) * block
        return sharded + gathered + max(in_blocks, (_COMPUTE + _FULL) * root - gathered)
    in_microbatch = max(_COMPUTE * root, late_root + _COMPUTE * block)
    return sharded + _COMPUTE * p + max(0, _FULL * p + in_microbatch - _FULL * p // shards)


def peak_bytes(
    model: Model, schedule: str, *, shards: int, ranks: int, tokens: int, checkpointing: bool, fused_head: bool
) -> int | None:
    """With the activations of a microbatch of `tokens` tokens; None where a token's are not known."""
    each = model.activation_bytes_checkpointed if checkpointing else model.activation_bytes
    if each is None:
        return None
    each += 0 if fused_head else model.logits_bytes
    return state_bytes(model, schedule, shards=shards, ranks=ranks) + each * tokens
