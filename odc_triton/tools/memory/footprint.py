"""The bytes that a model takes on each rank, before anything is allocated; for FSDP2 too, by the same sums.

[Note: what a plan counts] Sizes come from shapes and dtypes alone, so a model on the meta device is planned
like a real one. The rank described is rank 0: dim 0 is split as `torch.chunk` splits it, so no rank holds
more. Parts that don't peak together (unsharded parameters, whole gradients, activations) are added up. Not
counted: the allocator's rounding and caches, kernels' workspaces, the runtime (CUDA context, Python).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...checkpoint.parameters import plain_elements
from ...comm.layout import ALIGNMENT_BYTES, EXACT, ParameterSpec, aligned, find_units, make_layout, shard_rows
from ...nn.choice import TABLE
from ...optim import adamw8bit
from ...optim import buffers as muon_buffers
from ...plan.decoder import Decoder
from ...sequence import buffers as kv_buffers
from ...sharding.collect import check_policy, find_parameters, spec_of
from .layers import FORMATS, element_bytes, makes_gradient, other_experts_bytes, stored
from .peaks import (
    ROOT,
    Units,
    activation_bytes_per_token,
    fsdp2_whole_gradient_bytes,
    gathered_bytes,
    long_bytes_per_token,
    read_bytes,
    text_config,
    whole_gradient_bytes,
)
from .table import side_by_side

SCHEMES = ("odc", "fsdp2", "fsdp2_no_reshard")
BACKENDS = ("cpu", "cuda")
# Per trainable parameter: tensors of the master's shape and dtype that are kept, and bytes of scalars.
OPTIMIZER_STATES = {"adamw": (2, 4), "sgd": (0, 0), "muon": (1, 0), "none": (0, 0)}
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

    @property
    def title(self) -> str:
        ranks = f"{self.replicas}x{self.world}" if self.replicas > 1 else self.world
        ranks = ranks if self.run_ranks is None else f"{self.run_ranks} of {ranks}"
        return f"{self.scheme}/{self.backend}/{ranks}"

    def __str__(self) -> str:
        return side_by_side(self)


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

    ranks = _Ranks(world=world, run_ranks=run_ranks or world, replicas=replicas)
    trained = _trained(specs)
    by_muon = [spec for spec in trained if optimizer == "muon" and spec.is_block_matrix]
    others = [spec for spec in trained if spec not in by_muon]
    states = _state_bytes(ranks, "muon", by_muon)
    states += _state_bytes(ranks, "adamw" if optimizer == "muon" else optimizer, others)
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
        memory = _of_odc(specs, whole, made, by_muon, ranks, backend)
        memory["gathered_bytes"] += dequantized
        if backend == "cuda":
            experts = [(entry, spec) for entry, spec, reads in every if reads and entry.keeps_rows(backend, TABLE)]
            memory["other_experts_bytes"] = other_experts_bytes(experts, world, expert_cache_bytes)
    else:
        memory = _of_fsdp2(specs, ranks, resharded=scheme == "fsdp2")
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
        split_bytes = _split_bytes(decoder, largest.compute_dtype, in_flight=in_flight, **sizes)
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


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """The ranks that parameters are split over: frozen ones over `world`, those that train over `run_ranks` of them;
    and again over `replicas`.
    """

    world: int
    run_ranks: int
    replicas: int = 1

    def shard_bytes(self, specs: Iterable[ParameterSpec], dtype_field: str, alignment_bytes: int = 1) -> int:
        """Of rank 0, in the dtype that this field of a spec names."""
        total = 0
        for spec in specs:
            ranks = self.world if spec.reduce_dtype is None else self.run_ranks
            _, in_shard = shard_rows(spec.shape[0], ranks, 0)
            rows = shard_rows(in_shard, self.replicas, 0)[1:]
            n_bytes = math.prod((*rows, *spec.shape[1:])) * element_bytes(getattr(spec, dtype_field))
            total += aligned(n_bytes, alignment_bytes)
        return total


def _trained(specs: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    return [spec for spec in specs if spec.reduce_dtype is not None]


def _unit_bytes(specs: Iterable[ParameterSpec], dtype_field: str) -> Units:
    """Of each unit's whole parameters, by the unit's name; the root is always included."""
    units: Units = defaultdict(int, {ROOT: 0})
    for spec in specs:
        units[spec.unit] += math.prod(spec.shape) * element_bytes(getattr(spec, dtype_field))
    return units


def _of_odc(
    specs: list[ParameterSpec],
    whole: list[ParameterSpec],
    made: list[ParameterSpec],
    by_muon: list[ParameterSpec],
    ranks: _Ranks,
    backend: str,
) -> dict[str, int]:
    """Fields of the plan. `whole`: what is gathered; `made`: what has whole gradients; `by_muon`: what Muon steps."""
    world, run, apart = ranks.world, ranks.run_ranks, backend == "cuda"
    in_replica = replace(ranks, replicas=1)
    trained = _trained(specs)
    # On CUDA each rank allocates its own region, of the same size on all ranks, with every shard aligned in it.
    # On the CPU there is one mapping, in which the shards of a parameter are contiguous; runs have one each.
    alignment = ALIGNMENT_BYTES if apart else 1
    compute_shard = in_replica.shard_bytes(specs, "compute_dtype", alignment)
    gradient_shard = in_replica.shard_bytes(trained, "reduce_dtype", alignment)
    in_run, base = (specs, []) if run == world else (trained, [spec for spec in specs if spec.reduce_dtype is None])
    of_replica = world * (compute_shard + gradient_shard)
    if not apart:
        dtypes = {dtype for spec in specs for dtype in (spec.compute_dtype, spec.reduce_dtype) if dtype is not None}
        itemsizes = {dtype: element_bytes(dtype) for dtype in dtypes}
        parts = ((world // run, in_run), (1, base))
        of_replica = sum(n * make_layout(some, world=run, itemsizes=itemsizes).size_bytes for n, some in parts)
    shapes = [spec.shape for spec in by_muon]
    muon_bytes = aligned(muon_buffers.buffer_regions(shapes, world=run, apart=True)[1])
    of_run = run * muon_bytes if apart else muon_buffers.buffer_regions(shapes, world=run, apart=False)[1]
    of_replica += world // run * of_run
    with_gradient = _trained(made)
    tied = _unit_bytes([spec for spec in with_gradient if len(spec.names) > 1], "compute_dtype")
    return {
        "compute_shard_bytes": compute_shard,
        "gradient_shard_bytes": gradient_shard,
        "master_shard_bytes": ranks.shard_bytes([spec for spec in specs if spec.has_own_master], "master_dtype"),
        "gradient_cast_bytes": ranks.shard_bytes([spec for spec in trained if _copies_gradient(spec)], "master_dtype"),
        "gathered_bytes": gathered_bytes(_unit_bytes(whole, "compute_dtype")) if apart else 0,
        "transient_gradient_bytes": whole_gradient_bytes(
            _unit_bytes(with_gradient, "compute_dtype"), tied=sum(tied.values())
        ),
        "muon_bytes": muon_bytes,
        "job_shared_bytes": of_replica * ranks.replicas,
    }


def _copies_gradient(spec: ParameterSpec) -> bool:
    """True if `.grad` is a separate tensor. That of an exact sum is fp32 in the sum's own memory."""
    reduced = "float32" if spec.reduce_dtype == EXACT else spec.reduce_dtype
    return reduced != spec.master_dtype


def _of_fsdp2(specs: list[ParameterSpec], ranks: _Ranks, *, resharded: bool) -> dict[str, int]:
    """Fields of the plan. `resharded`: blocks are, after forward."""
    trained = _trained(specs)
    units = _unit_bytes(specs, "compute_dtype")
    gathered = gathered_bytes(units) if resharded else sum(units.values())
    gradient_shard = ranks.shard_bytes(trained, "master_dtype")
    # The root's parameters that are registered before the first block get their gradients after the blocks.
    first_block = next((i for i, spec in enumerate(trained) if spec.unit != ROOT), 0)
    late = [spec for i, spec in enumerate(trained) if i >= first_block or len(spec.names) > 1]
    whole_gradients = fsdp2_whole_gradient_bytes(
        _unit_bytes(trained, "compute_dtype"),
        _unit_bytes(trained, "reduce_dtype"),
        late_root=_unit_bytes(late, "compute_dtype")[ROOT],
        resharded=resharded,
        gathered_bytes=gathered,
        shard_bytes=gradient_shard,
    )
    return {
        "gradient_shard_bytes": gradient_shard,
        "master_shard_bytes": ranks.shard_bytes(specs, "master_dtype"),
        "gathered_bytes": gathered,
        "transient_gradient_bytes": whole_gradients,
    }


def _state_bytes(ranks: _Ranks, optimizer: str, specs: Sequence[ParameterSpec]) -> int:
    if optimizer == "adamw-8bit":
        return sum(adamw8bit.state_bytes(spec.shape, (ranks.run_ranks, ranks.replicas)) for spec in specs)
    tensors, scalar_bytes = OPTIMIZER_STATES[optimizer]
    return tensors * ranks.shard_bytes(specs, "master_dtype") + scalar_bytes * len(specs)


def _split_bytes(
    decoder: Decoder, dtype: str, *, tokens: int, cuts: int, world: int, in_flight: int | None, gradients: bool
) -> int:
    """Of one rank."""
    widths, found = (decoder.key_width, decoder.value_width), decoder.recurrent
    layers = [kv_buffers.LayerShape(heads=decoder.kv_heads, widths=widths, dtype=dtype)] * decoder.attending
    if found is not None:
        kernel = {"rows_per_cut": found.kernel - 1, "dtype": dtype}
        layers += [kv_buffers.LayerShape(heads=1, widths=(found.channels,), **kernel)] * decoder.recurring
    if found is not None and found.heads:
        how = {"rows_per_cut": 1, "states": True, "dtype": "float64" if dtype == "float64" else "float32"}
        pair = (found.key_width**2 if found.is_paired else 1, found.key_width * found.value_width)
        layers += [kv_buffers.LayerShape(heads=found.heads, widths=pair, **how)] * decoder.recurring
    sizes = {"tokens": tokens, "cuts": cuts, "world": world, "gradients": gradients}
    return kv_buffers.buffer_regions(layers, **sizes, in_flight=in_flight or len(layers), apart=True)[1]
