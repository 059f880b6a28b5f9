"""`fully_shard`: from a module to shards in the heap, an engine, and units.

In four steps: describe what to shard; agree on it with the other ranks; allocate memory and fill it; attach engine and
units to the module.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from odc_kernels.staged import Staging

from ..base.deadlines import Timeout, timedelta_of
from ..base.untyped import untyped
from ..comm.grid import Grid, grid_of, refuse_mesh
from ..comm.layout import MemoryLayout, make_layout
from ..comm.replicas import Replicas
from ..engine.member import Wiring
from ..engine.module import Engine, ODCModule
from ..engine.module import attach as attach_unit
from ..engine.parameter import ShardedParameter, Slot
from ..engine.unit import Unit
from ..nn.operand import ReadsTables
from .agree import AGREEING, agree, default_mesh, open_barrier, open_heap, refusing, require_module
from .allocate import Allocation, shards_of
from .backend import Backend, backend_of
from .borrow import borrow
from .collect import SHARDABLE_DTYPES, Description, check_policy, describe, dtype_name
from .initialize import write_initial_values

if TYPE_CHECKING:
    from ..nn.tuned import Tuned

Module = TypeVar("Module", bound=nn.Module)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)  # of exact sums, and packed weights


def fully_shard(
    module: Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    backend: str = "auto",
    timeout: Timeout = timedelta(minutes=30),
    debug: bool = False,
    exact: bool | None = None,
    expert_cache_bytes: int = 0,
    base: nn.Module | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    offload_policy: OffloadPolicy | None = None,
    dp_mesh_dims: object = None,
) -> Module:
    """Shards `module` in place over the ranks of `mesh`. Collective.

        model = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for packs in sampler:
            with minibatch(model, plan=packs) as mb:
                for pack in packs:  # ranks may have different numbers of them
                    (summed_loss(model, pack) / mb.tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

    Call it once on the root (units are found: `_no_split_modules`, else the longest ModuleList) or on blocks and then
    on the root, as with FSDP2. Parameters become DTensors, Shard(0), over this rank's rows; create the optimizer
    afterwards. Initial values are rank 0's; other ranks may hold the model on the meta device, and if all do, every
    module's own initialisation runs once. What the module computes does not change.

    module: a module, or a list of modules, each of which is a unit then, as blocks are.
    mesh: by default all ranks, with a copy of the model per host; without a process group this starts torchrun's, or
        else a world of one. The ranks of a mesh of one dimension share memory, so they are on one host. With two,
        ("replicate", "shard"), those of the second share memory, and masters and optimizer states are sharded over all:
        docs/memory.md, "Several nodes".
    mp_policy: as in FSDP2, but `reduce_dtype=None` means fp32 accumulation. By default the parameters' own dtype.
    reshard_after_forward: as in FSDP2: whether whole parameters are freed between forward and backward; by default in
        all units but the root. An int counts as True. No effect on the CPU backend, where whole parameters are views.
    ignored_params: stay as they are on every rank.
    backend: "cpu", "cuda", or "auto": the mesh's, and without a mesh CUDA if there is a GPU.
    timeout: how late a live rank may be at a barrier, a timedelta or seconds. Ranks notice a dead peer at their next
        microbatch or barrier, on another machine only at a barrier.
    debug: catch collectives inside a minibatch.
    exact: sum gradients as 64-bit integers, so that sums have the same bits in whatever order ranks add to them; twice
        the memory for gradient shards. By default what `torch.use_deterministic_algorithms` says now. A minibatch may
        then raise MinibatchToRepeat: docs/exact.md.
    expert_cache_bytes: memory of each rank for other ranks' experts of this module, and sums of their gradients: what
        is kept crosses the link once in a minibatch. For experts of `replace_layers` that run `staged` or by kernels
        (docs/layers.md). No effect on the CPU backend, where they are views.
    base: a frozen model that `fully_shard` returned, over ranks that `mesh` is part of. Frozen parameters of `module`
        are then the base's, found by their names below PEFT's wrapper; they take no memory, and what `module` has of
        them is dropped. Collective over `mesh` alone, so others may train other adapters: docs/many_runs.md.
    shard_placement_fn, offload_policy, dp_mesh_dims: FSDP2's; only what means Shard(0), no offloading, no dims.

    Returns `module`. Raises ValueError, TypeError, NotImplementedError or
    RuntimeError for models and options that can't be sharded, RanksDiffer with the first difference if the ranks
    differ, DeadlineExceeded if a rank does not come.
    """
    modules = _outermost(module) if isinstance(module, (list, tuple)) else [module]
    ignored = set() if ignored_params is None else set(ignored_params)
    for each in modules:
        _check_options(each, mp_policy, reshard_after_forward, ignored)
        _check_placements(each, shard_placement_fn, ignored)
    timeout = timedelta_of(timeout)
    offloads = type(offload_policy) is not OffloadPolicy  # that one is FSDP2's default, and means none
    _refuse_given(dp_mesh_dims=dp_mesh_dims, offload_policy=offload_policy if offloads else None)
    if not isinstance(exact, bool | None):
        raise TypeError(f"exact is {exact!r}; give True, False or None")
    if isinstance(expert_cache_bytes, bool) or not isinstance(expert_cache_bytes, int) or expert_cache_bytes < 0:
        raise ValueError(f"expert_cache_bytes is {expert_cache_bytes!r}; give a number of bytes, 0 for none")
    exact = torch.are_deterministic_algorithms_enabled() if exact is None else exact
    policy = mp_policy or MixedPrecisionPolicy()
    if exact and policy.reduce_dtype is not None:
        raise ValueError(
            f"mp_policy has reduce_dtype={policy.reduce_dtype} and exact sums are int64: leave one of them out"
        )
    with torch.device("cpu"):  # a default device of the caller's, such as meta, is not for what is allocated here
        mesh = mesh if mesh is not None else default_mesh(timeout, backend)
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}; give a DeviceMesh, see init_device_mesh")
        device = backend_of(backend, mesh)
        _check_mesh(mesh, device)
        grid = grid_of(mesh)
        barrier = open_barrier(grid, timeout)
        root, units = module, None
        if modules[0] is not module:  # a parent, for the time of sharding, in which each is a unit
            root, units = nn.ModuleList(modules), [str(place) for place in range(len(modules))]
        if (ours := next((each for each in root.modules() if hasattr(each, "adapt_wrappers")), None)) is not None:
            untyped(ours).adapt_wrappers(root)
        with refusing(barrier, AGREEING):
            if "bitsandbytes" in sys.modules:
                from ..nn.packed import prepare

                prepare(root, ignored)
            described = describe(root, grid.mesh, policy, ignored, home=device.mesh_device, exact=exact, units=units)
            loan = None if base is None else borrow(base, described, root, device=device, grid=grid)
            if loan is not None:
                barrier.guards.append(loan.base.require_peers)
            device.check(described.specs)
        plan = _plan(described, grid, device)
        options = {"policy": policy, "debug": debug, "exact": exact, "timeout": timeout, "backend": device.name}
        options["expert_cache_bytes"] = expert_cache_bytes
        options |= {"world": grid.world, "replicas": grid.replicas}
        reader = next((each for each in root.modules() if isinstance(each, ReadsTables)), None)
        options["layers that read tables"] = reader is not None
        if loan is not None:
            options["borrowed"] = loan.digest
        agreed = agree(barrier, grid, plan, options, device, reader=reader)
        heap = open_heap(barrier, grid, device, plan, agreed)
        transport = device.transport(heap, device.streams(), barrier.timeout_s)
        replicas = Replicas(grid, barrier, heap.device)
        allocation = Allocation(
            described=described,
            device=device,
            tuned=agreed.tuned,
            staging=Staging(transport.streams.device),
            expert_cache_bytes=expert_cache_bytes,
        )
        parameters = allocation.parameters(described.found, shards_of(plan, heap, grid, exact=exact), transport)
        token = f"{agreed.token}-{grid.replica}-initial"
        write_initial_values(root, described.found, parameters, barrier, replicas, token=token, heap=heap)
        if grid.rank == 0:
            _warn(plan, agreed.tuned)
        wiring = Wiring(grid=grid, transport=transport, barrier=barrier, replicas=replicas)
        engine = Engine(wiring, deterministic=exact, debug=debug)
        engine.place = partial(device.place, agreed.devices)
        if loan is not None:
            for lent, found, shards in loan.by_heap():
                from_owners = device.transport(lent, transport.streams, barrier.timeout_s)
                parameters += allocation.parameters(found, shards, from_owners)
                described.found += found
            engine.borrow_from(loan.base)
        _attach(engine, root, described, parameters, policy, reshard_after_forward)
        engine.publish()
        barrier.exchange("sharded", {})
    return module


def _outermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that are not inside of another. Raises TypeError if one is no module, ValueError for an empty list."""
    if not modules:
        raise ValueError("fully_shard was given an empty list: give at least one module")
    for each in modules:
        if not isinstance(each, nn.Module):
            raise TypeError(f"fully_shard takes nn.Modules; the list holds a {type(each).__name__}")
    inside = {id(below) for each in modules for below in list(each.modules())[1:]}
    return [each for each in dict.fromkeys(modules) if id(each) not in inside]


def _check_placements(module: nn.Module, placement_of: Any, ignored: set[nn.Parameter]) -> None:
    """Raises NotImplementedError if FSDP2's `shard_placement_fn` asks for another split than on dim 0."""
    for name, parameter in module.named_parameters() if placement_of is not None else ():
        known = parameter in ignored or isinstance(parameter, DTensor)
        placement = None if known or placement_of is None else placement_of(parameter)
        if placement not in (None, Shard(0), Shard(-parameter.ndim)):
            raise NotImplementedError(
                f"shard_placement_fn returned {placement} for {name}: parameters are split on dim 0, return Shard(0) "
                f"or None"
            )


def _plan(described: Description, grid: Grid, device: Backend) -> MemoryLayout:
    itemsizes = {dtype_name(dtype): dtype.itemsize for dtype in (*SHARDABLE_DTYPES, *INTEGERS)}
    return make_layout(described.specs, world=grid.shards, itemsizes=itemsizes, apart=device.apart)


def _attach(
    engine: Engine,
    module: nn.Module,
    described: Description,
    parameters: list[ShardedParameter],
    policy: MixedPrecisionPolicy,
    reshard_after_forward: bool | int | None,
) -> None:
    """Makes the units; submodules that were sharded before join the engine. Drops the tensors that were found."""
    by_unit: dict[str, list[Slot]] = {name: [] for name in [*described.unit_names, ""]}
    for entry, parameter in [*zip(described.found, parameters, strict=True), *described.tied]:
        for owner, attribute, unit in entry.places:
            by_unit[unit].append(Slot(owner, attribute, parameter))
    if described.is_list:
        del by_unit[""]
    for name, slots in by_unit.items():
        owner = module.get_submodule(name)
        unit = Unit(
            name=name,
            module=owner,
            slots=slots,
            policy=policy,
            passes=engine.passes,
            reshard_after_forward=None if reshard_after_forward is None else bool(reshard_after_forward),
        )
        attach_unit(owner, unit, engine)
        engine.units.append(unit)
    engine.add(parameters)
    engine.ignored |= {id(parameter): parameter for parameter in described.ignored}
    for other in described.inner:
        engine.absorb(other)
    engine.name_parameters(module)
    described.forget()


def _check_options(module: Any, mp_policy: Any, reshard_after_forward: Any, ignored_params: Any) -> None:
    require_module(module, "fully_shard")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: call it on the parent or the "
            f"children of this {type(module).__name__}"
        )
    if isinstance(module, ODCModule):
        raise ValueError(f"{type(module).__name__} is sharded already: call fully_shard once per module, blocks first")
    check_policy(mp_policy)
    if not isinstance(reshard_after_forward, (bool, int, type(None))):
        raise TypeError(f"reshard_after_forward is {reshard_after_forward!r}; it must be a bool, an int or None")
    for parameter in ignored_params:
        if not isinstance(parameter, nn.Parameter):
            raise TypeError(f"ignored_params holds {parameter!r}; give the parameters themselves, not their names")


def _refuse_given(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is not supported, leave it out: parameters are split on dim 0, in memory"
            )


def _check_mesh(mesh: DeviceMesh, backend: Backend) -> None:
    refuse_mesh(mesh)
    if mesh.device_type != backend.mesh_device:
        raise ValueError(
            f"mesh is on {mesh.device_type!r} and backend is {backend.name!r}; leave backend out, or give "
            f"init_device_mesh({backend.mesh_device!r}, …)"
        )


def _warn(plan: MemoryLayout, tuned: Tuned | None) -> None:
    if tuned is not None and tuned.unused is not None:
        warnings.warn(tuned.unused, stacklevel=3)
    low = [s for s in plan.parameters if s.reduce_dtype is not None and s.master_dtype in ("bfloat16", "float16")]
    if low:
        warnings.warn(
            f"{len(low)} trainable parameters are {low[0].master_dtype} ({low[0].name}, …): small updates are lost to "
            f"rounding. Load the model in fp32 and pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16).",
            stacklevel=3,
        )
