"""The bytes that a model takes on each rank, before anything is allocated; for FSDP2 too, by the same sums.

[Note: what a plan counts] Sizes come from shapes and dtypes alone, so a model on the meta device is planned
like a real one. The rank described is rank 0: dim 0 is split as `torch.chunk` splits it, so no rank holds
more. Parts that don't peak together (unsharded parameters, whole gradients, activations) are added up. Not
counted: the allocator's rounding and caches, kernels' workspaces, the runtime (CUDA context, Python).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...checkpoint.parameters import plain_elements
from ...comm.layout import find_units
from ...jobs.reports.report import in_columns
from ...nn.choice import TABLE
from ...plan.decoder import Decoder
from ...sequence import buffers as kv_buffers
from ...sharding.collect import check_policy, find_parameters, spec_of
from .layers import FORMATS, makes_gradient, other_experts_bytes, stored
from .peaks import activation_bytes_per_token, long_bytes_per_token, read_bytes, text_config
from .shards import (
    OPTIMIZER_STATES,
    Ranks,
    element_bytes,
    of_fsdp2,
    of_odc,
    split_buffer_bytes,
    state_bytes,
    trained_of,
)

SCHEMES = ("odc", "fsdp2", "fsdp2_no_reshard")
BACKENDS = ("cpu", "cuda")
OPTIMIZERS = (*OPTIMIZER_STATES, "adamw-8bit")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the fullest rank (rank 0) and, where the name begins with `job_`, of all ranks together: what
    `memory_plan` returns. `print(plan)` shows it in GB (10^9 bytes), below 1 GB in MB.
    """

    scheme: str
    backend: str
    world: int
    """Ranks that share the compute and gradient shards: all, or with replicas those of one replica."""
    replicas: int
    run_ranks: int | None = None
    """Ranks of one run over a base that all `world` ranks share; None: there is one run, on all."""
    parameters: int
    """Elements in the whole model, before they are packed, tied ones counted once."""
    compute_shard_bytes: int = 0
    """Peer-readable shard in the compute dtype; without a `param_dtype`, the master itself. 0 for FSDP2."""
    gradient_shard_bytes: int
    """Peer-addable shard in the reduce dtype (ODC), or `.grad` in the master's dtype (FSDP2)."""
    master_shard_bytes: int
    """Private shard in the parameter's own dtype; 0 where the compute shard is the master."""
    optimizer_state_bytes: int
    gradient_cast_bytes: int = 0
    """`.grad` in the master's dtype if the reduce dtype differs: from exit to the next entry."""
    buffer_bytes: int
    """The module's buffers, whole on every rank."""
    gathered_bytes: int
    """Unsharded parameters at their peak, in the compute dtype; 0 where gathering is a view. And the largest packed
    weight, dequantised: bitsandbytes makes one at a time.
    """
    transient_gradient_bytes: int
    """Upper bound of whole (unsharded) gradients alive at once in a backward."""
    activation_bytes_per_token: int | None
    """Estimated bytes that a microbatch keeps for backward per token, logits included; None: not known."""
    tokens_per_microbatch: int
    split_bytes: int
    """Keys and values of `enable_split` that peers read, gradients that they add to, and flags."""
    other_experts_bytes: int = 0
    """Other ranks' experts: kept ones, with their gradients' sums, and two slots that others are copied through."""
    muon_bytes: int = 0
    """Rows of matrices that Muon reads whole and writes back, in bf16."""
    read_bytes: int
    """Rows of split sequences on other ranks, and their gradients, that attention has at once."""
    offloaded_bytes: int
    """Host memory for `offload_checkpoints`: of one microbatch."""
    checkpoint_host_bytes: int
    """Host memory for checkpoints written in the background: masters, optimizer states and buffers once more."""
    job_shared_bytes: int = 0
    """Shared memory of the whole job, alignment included: on the CPU backend what PSS shows, counted once."""

    @property
    def shared_bytes(self) -> int:
        """This rank's part of the memory that peers read and add to; 0 for FSDP2."""
        if self.scheme != "odc":
            return 0
        return self.compute_shard_bytes + self.gradient_shard_bytes + self.split_bytes + self.muon_bytes

    @property
    def persistent_private_bytes(self) -> int:
        """Private bytes that stay: master, optimizer states, buffers; with FSDP2 also `.grad`, on the CPU also
        `checkpoint_host_bytes`.
        """
        kept = self.master_shard_bytes + self.optimizer_state_bytes + self.buffer_bytes + self.other_experts_bytes
        if self.backend == "cpu":
            kept += self.checkpoint_host_bytes
        return kept if self.scheme == "odc" else kept + self.gradient_shard_bytes

    @property
    def transient_bytes(self) -> int:
        """Private bytes that come and go within a minibatch, each part at its peak; activations not included."""
        return self.gathered_bytes + self.transient_gradient_bytes + self.gradient_cast_bytes

    @property
    def activation_bytes(self) -> int:
        """One microbatch's, on the device; 0 where no estimate is known."""
        return self.tokens_per_microbatch * (self.activation_bytes_per_token or 0) + self.read_bytes

    @property
    def private_bytes(self) -> int:
        return self.persistent_private_bytes + self.transient_bytes + self.activation_bytes

    @property
    def total_bytes(self) -> int:
        return self.shared_bytes + self.private_bytes

    def __str__(self) -> str:
        return side_by_side(self)


_ROWS = (
    ("parameter shard, compute dtype", "compute_shard_bytes"),
    ("parameter shard, master", "master_shard_bytes"),
    ("gradient shard", "gradient_shard_bytes"),
    ("gradient cast to the master's dtype", "gradient_cast_bytes"),
    ("optimizer states", "optimizer_state_bytes"),
    ("split sequences", "split_bytes"),
    ("rows for Muon", "muon_bytes"),
    ("other ranks' experts", "other_experts_bytes"),
    ("buffers", "buffer_bytes"),
    ("checkpoints in the background, host", "checkpoint_host_bytes"),
    ("unsharded parameters, peak", "gathered_bytes"),
    ("unsharded gradients, peak", "transient_gradient_bytes"),
    ("activations (estimate)", "activation_bytes"),
    ("total", "total_bytes"),
    ("of which readable by peers", "shared_bytes"),
    ("whole job, shared memory", "job_shared_bytes"),
)


def side_by_side(*plans: MemoryPlan) -> str:
    """An aligned text table with one column per plan (scheme/backend/world), in GB (10^9 bytes) per rank, in MB if no
    total is 1 GB.
    """
    unit, of = ("GB", 1e9) if max(plan.total_bytes for plan in plans) >= 1e9 else ("MB", 1e6)

    def cell(plan: MemoryPlan, name: str) -> str:
        if name == "activation_bytes" and plan.activation_bytes_per_token is None:
            return "unknown"
        return f"{getattr(plan, name) / of:.3f}"

    rows = [[f"{unit} per rank", *(_title(plan) for plan in plans)]]
    optional = ("split_bytes", "muon_bytes", "other_experts_bytes", "checkpoint_host_bytes")
    shown = [row for row in _ROWS if row[1] not in optional or any(getattr(plan, row[1]) for plan in plans)]
    rows += [[label, *(cell(plan, name) for plan in plans)] for label, name in shown]
    return "\n".join(in_columns(rows, numbers=True))


def _title(plan: MemoryPlan) -> str:
    ranks = f"{plan.replicas}x{plan.world}" if plan.replicas > 1 else plan.world
    ranks = ranks if plan.run_ranks is None else f"{plan.run_ranks} of {ranks}"
    return f"{plan.scheme}/{plan.backend}/{ranks}"


def memory_plan(
    model: nn.Module,
    world: int,
    *,
    replicas: int = 1,
    run_ranks: int | None = None,
    scheme: str = "odc",
    mp_policy: MixedPrecisionPolicy | None = None,
    quantize: str | None = None,
    optimizer: str = "adamw",
    backend: str = "auto",
    tokens_per_microbatch: int = 0,
    gradient_checkpointing: bool = False,
    split_tokens: int = 0,
    split_cuts: int = kv_buffers.CUTS,
    offload_checkpoints: bool = False,
    exact: bool = False,
    expert_cache_bytes: int = 0,
    checkpoint_background: bool = False,
) -> MemoryPlan:
    """Bytes per rank that training `model` on `world` ranks takes. Nothing is allocated.

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        print(memory_plan(model, 8, backend="cuda", mp_policy=policy))

    Sizes come from shapes and dtypes alone. Not counted: temporary memory inside of kernels and layers, the allocator's
    unused blocks, and the context of CUDA and its libraries.

    model: a module that is not sharded yet; it may be on the meta device.
    world: ranks that share one copy of the parameters.
    replicas: copies, of `world` ranks each, as in `fully_shard` with a mesh ("replicate", "shard"): what peers read and
        add to is split over `world` ranks, masters and optimizer states over `world * replicas`.
    run_ranks: the ranks of each of the runs over one base (`fully_shard(base=)`), docs/many_runs.md. What is frozen is
        split over all `world` ranks, without masters: the base has its compute dtype. What trains is over `run_ranks`.
    scheme: "odc" (this library), "fsdp2" (`fully_shard` with its defaults: blocks resharded after forward, the root
        not) or "fsdp2_no_reshard" (`reshard_after_forward=False`, gradients reduced on the last microbatch only). All
        get the same units and dtypes; a `reduce_dtype` of None is fp32, although FSDP2 itself reads it as param_dtype.
    mp_policy: as in `fully_shard`: None computes in the parameters' own dtype, which is often fp32.
    quantize: "nf4" (absmax quantised too) or "int8", as bitsandbytes packs frozen linear layers but the head, and
        experts. What bitsandbytes has packed in `model` is counted as it is.
    optimizer: "adamw", "adamw-8bit", "sgd" (no momentum), "muon" (for the matrices of blocks, and AdamW for the rest)
        or "none".
    backend: "auto" is "cuda" if torch sees a GPU, else "cpu": on a machine without one, give "cuda" to plan for GPUs.
        On "cpu" gathering is a view. On "cuda", weights that replaced layers (`replace_layers`) read from their owners
        are never gathered. Their gradients are not materialized either, except for linear layers and experts without
        "triton/fused". The backend matters to ODC only.
    tokens_per_microbatch: for the activations; 0 leaves them out.
    gradient_checkpointing: activations are those of blocks that are computed again in the backward.
    split_tokens: what `enable_split` is given; 0: no sequence is split. Activations are then larger; of hybrids, those
        of a segment between two others, the largest.
    split_cuts: what `enable_split` is given, for the states of hybrids.
    offload_checkpoints: what checkpointing keeps goes to the host.
    exact, expert_cache_bytes: what `fully_shard` is given. Experts are kept on "cuda" only.
    checkpoint_background: each rank holds masters and states once more on the host while `train sft` writes them.

    Returns the plan, in bytes; printed it is in GB (10^9 bytes). Raises ValueError for world or replicas < 1, if
    run_ranks exceeds world or is combined with replicas, for ODC-only options with scheme="fsdp2", negative tokens, an
    unknown name, or a model without parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"memory_plan takes an nn.Module, not a {type(model).__name__}")
    check_policy(mp_policy)
    counts = {"world": world, "replicas": replicas, "tokens_per_microbatch": tokens_per_microbatch}
    limits = {"split_tokens": split_tokens, "expert_cache_bytes": expert_cache_bytes}
    for name, value in (counts | limits | {"split_cuts": split_cuts}).items():
        least = int(name in ("world", "replicas"))
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; give a whole number of at least {least}")
    own = limits | {"offload_checkpoints": offload_checkpoints, "checkpoint_background": checkpoint_background}
    own |= {"replicas": replicas if replicas > 1 else 0, "exact": exact, "quantize": quantize, "run_ranks": run_ranks}
    for name, value in own.items():
        if value and scheme != "odc":
            raise ValueError(f"{name} is {value} for {scheme!r}: it is for 'odc' only, leave it out")
    if run_ranks is not None and (replicas > 1 or run_ranks not in range(1, world + 1)):
        raise ValueError(f"run_ranks is {run_ranks!r}: give 1 to world={world}, and plan one host, without replicas")
    if offload_checkpoints and not gradient_checkpointing:
        raise ValueError("offload_checkpoints needs gradient_checkpointing=True: nothing else is offloaded")
    for name, value, known in (
        ("scheme", scheme, SCHEMES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("backend", backend, ("auto", *BACKENDS)),
        ("quantize", quantize, (None, *FORMATS)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; use one of {', '.join(map(repr, known))}")
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    found = find_parameters(model, find_units(model), set())
    plain = [spec_of(entry, mp_policy, exact=exact) for entry in found]
    if run_ranks is not None:
        plain = [spec if spec.reduce_dtype else replace(spec, master_dtype=spec.compute_dtype) for spec in plain]
    if not plain:
        raise ValueError(f"{type(model).__name__} has no parameters; plan the model that will be trained")
    head = getattr(model, "get_output_embeddings", nn.Module)()
    kept = set(map(id, head.parameters() if isinstance(head, nn.Module) else [head]))
    packed = [stored(entry, spec, quantize, kept) for entry, spec in zip(found, plain, strict=True)]
    dequantized = max(n_bytes for _, n_bytes in packed)
    if quantize is not None and not dequantized:
        raise ValueError(f"quantize is {quantize!r}, and {type(model).__name__} has no frozen linear layer: add LoRA")
    specs = [spec for of_entry, _ in packed for spec in of_entry]

    ranks = Ranks(world=world, run_ranks=run_ranks or world, replicas=replicas)
    trained = trained_of(specs)
    by_muon = [spec for spec in trained if optimizer == "muon" and spec.is_block_matrix]
    others = [spec for spec in trained if spec not in by_muon]
    states = state_bytes(ranks, "muon", by_muon)
    states += state_bytes(ranks, "adamw" if optimizer == "muon" else optimizer, others)
    buffer_bytes = sum(buffer.numel() * buffer.itemsize for buffer in model.buffers())
    buffer_bytes *= 1 if run_ranks is None else 2  # the base's too
    host_bytes = ranks.shard_bytes(specs, "master_dtype") + states + buffer_bytes
    if scheme == "odc":
        every = [
            (entry, spec, not n_bytes and entry.is_read_on_demand(backend, TABLE))
            for entry, (of_entry, n_bytes) in zip(found, packed, strict=True)
            for spec in of_entry
        ]
        whole = [spec for _, spec, reads in every if not reads]
        made = [spec for entry, spec, reads in every if not reads or makes_gradient(entry, backend)]
        memory = of_odc(specs, whole, made, by_muon, ranks, backend)
        memory["gathered_bytes"] += dequantized
        if backend == "cuda":
            experts = [(entry, spec) for entry, spec, reads in every if reads and entry.keeps_rows(backend, TABLE)]
            memory["other_experts_bytes"] = other_experts_bytes(experts, world, expert_cache_bytes)
    else:
        memory = of_fsdp2(specs, ranks, resharded=scheme == "fsdp2")
    largest = max(plain, key=lambda spec: math.prod(spec.shape))
    itemsize, split_bytes, read, offloaded = element_bytes(largest.compute_dtype), 0, 0, 0
    how = {"itemsize": itemsize, "gradient_checkpointing": gradient_checkpointing, "split": bool(split_tokens)}
    per_token = activation_bytes_per_token(model, **how)
    if offload_checkpoints:
        config = text_config(model)
        layers, hidden = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
        if layers is None or hidden is None:
            raise ValueError(f"offload_checkpoints: {type(model).__name__} has no config with layers and a hidden_size")
        offloaded = tokens_per_microbatch * itemsize * hidden * layers
        per_token = per_token and per_token - itemsize * hidden * (layers - 2)
    if split_tokens:
        if getattr(config := text_config(model), "num_attention_heads", None) is None:
            name = type(model).__name__
            raise ValueError(f"split_tokens is {split_tokens}, and {name} has no config with num_attention_heads")
        decoder = Decoder.of(config)
        in_flight = kv_buffers.IN_FLIGHT if gradient_checkpointing or not trained else None
        sizes = {"tokens": split_tokens, "cuts": split_cuts, "world": run_ranks or world, "gradients": bool(trained)}
        split_bytes = split_buffer_bytes(decoder, largest.compute_dtype, in_flight=in_flight, **sizes)
        if gradient_checkpointing:
            widths = {"itemsize": itemsize, "sum_itemsize": max(itemsize, 4) if backend == "cuda" else itemsize}
            long = long_bytes_per_token(model, decoder, **widths, offloaded=offload_checkpoints)
            run = min(kv_buffers.RUN_TOKENS, split_tokens)
            read = read_bytes(decoder, tokens=run, **widths, apart=backend == "cuda")
            if decoder.recurring and (per_token is None or per_token > long + read // run):
                read = 0  # the peak is in a recurrent layer
            else:
                per_token = long
    job_shared = memory.pop("job_shared_bytes", 0) + world * replicas * split_bytes
    return MemoryPlan(
        scheme=scheme,
        backend=backend,
        world=world,
        replicas=replicas,
        run_ranks=run_ranks,
        parameters=sum(plain_elements(model).values()),
        optimizer_state_bytes=states,
        buffer_bytes=buffer_bytes,
        activation_bytes_per_token=per_token,
        tokens_per_microbatch=tokens_per_microbatch,
        split_bytes=split_bytes,
        read_bytes=read,
        offloaded_bytes=offloaded,
        checkpoint_host_bytes=host_bytes if checkpoint_background else 0,
        job_shared_bytes=job_shared,
        **memory,
    )
