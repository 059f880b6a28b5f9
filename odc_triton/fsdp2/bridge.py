"""`use_odc`: a model of torch's own `fully_shard` trains by on-demand communication.

FSDP2 stays as it is: its parameters, its order of gathers, its mixed precision. Its hooks for custom communication are
given a gather that reads the owners' memory, and a reduce-scatter that adds to it. At a minibatch's end `p.grad` is the
owners' sum.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ..base.deadlines import Timeout, timedelta_of
from ..comm.grid import Grid, grid_of
from ..comm.layout import MemoryLayout, place_regions
from ..comm.replicas import Replicas
from ..engine.forward import watch_backward
from ..engine.member import Wiring
from ..engine.minibatch import Participant, RefusesDeterminism, Trained
from ..engine.protocol import Protocol
from ..engine.shard import share_versions
from ..engine.transport import Streams, Transport
from ..engine.unit import Passes
from ..sharding.agree import AGREEING, agree, open_barrier, open_heap, refusing, require_module
from ..sharding.backend import Backend, backend_of
from ..sharding.collect import dtype_name
from .automatic import Automatic, How, how_of
from .found import FsdpUnit, ModuleOfFsdp, find_units, fsdp_modules, has_run, mesh_of, refuse_accumulation, syncing
from .unit import BridgedParameter, BridgedUnit, ReducedZeros

Module = TypeVar("Module", bound=nn.Module)
_CALL = "use_odc"
_IN_ANY_ORDER = (
    "torch.use_deterministic_algorithms(True), and gradients of a model of torch's fully_shard are added in the order "
    "of their arrival: for exact sums shard it by odc_triton.fully_shard(model, exact=True)"
)
_CONNECTED = "FSDP2's shards in shared memory"


def use_odc(
    model: Module,
    *,
    automatic: bool | Literal["eager"] = False,
    divide_factor: float | None = None,
    timeout: Timeout = timedelta(minutes=30),
    backend: str = "auto",
) -> Module:
    """Makes a model of torch's `fully_shard` train by on-demand communication. Collective.

    Call it after `fully_shard` and after the values are loaded, and put the microbatches of a step into `with
    odc_triton.minibatch(model):`. The model stays an FSDPModule, so optimizers, clipping, checkpoints and
    `full_tensor()` work outside of a minibatch as before. Rank 0 prints what was found.

    It takes more memory than FSDP2: on each rank a copy of its shards in the dtype that modules compute in, and the
    sums of its gradients in fp32, which take the place of FSDP2's.

    model: the root that torch's `fully_shard` returned.
    automatic: True for a loop that stays as it is. A minibatch then begins with the first forward that makes a graph,
        and ends where a gradient is used or an optimizer steps; `set_requires_gradient_sync` (no_sync) has no effect.
        Ranks may run different numbers of microbatches, also none. "eager": it ends with the backward in which FSDP2
        reduces, as it does by itself where parameters have post-accumulate-grad hooks.
    divide_factor: what gradients are divided by. By default what `set_gradient_divide_factor` said, else FSDP2's
        default, the number of ranks; with `minibatch(model, tokens=…)` 1.
    timeout: how late a live rank may be at a barrier, a timedelta or seconds. Ranks notice a dead peer at their next
        microbatch or barrier, on another machine only at a barrier.
    backend: as in `odc_triton.fully_shard`.

    Returns `model`. Raises TypeError for a model that torch's `fully_shard` has not sharded, NotImplementedError or
    ValueError with the remedy for options that can't be combined with it, RanksDiffer if the ranks differ,
    DeadlineExceeded if one does not come.
    """
    _check_options(model, divide_factor)
    how = how_of(automatic)
    return convert(model, automatic=how, divide_factor=divide_factor, timeout=timeout, backend=backend)


def convert(
    model: Module,
    *,
    automatic: How | None,
    divide_factor: float | None = None,
    timeout: Timeout = timedelta(minutes=30),
    backend: str = "auto",
    told: Mapping[str, Any] | None = None,
) -> Module:
    """`use_odc`. `told`: by name, what must be the same on all ranks, too."""
    timeout = timedelta_of(timeout)
    mesh = mesh_of(model)
    device, grid = backend_of(backend, mesh), grid_of(mesh)
    barrier = open_barrier(grid, timeout)
    with refusing(barrier, AGREEING, call=_CALL), syncing(model, automatic is not None):
        units = find_units(model)
        plan = _plan(units, grid, device)
        device.check(list(plan.parameters))
        factor = _divide_factor(units, divide_factor)
    options = {"divide_factor": factor, "timeout": timeout, "backend": device.name, "world": grid.world}
    options |= {"automatic": automatic, **(told or {})}
    agreed = agree(barrier, grid, plan, options, device, call=_CALL)
    heap = open_heap(barrier, grid, device, plan, agreed)
    engine = BridgedEngine(
        model,
        units,
        plan,
        Wiring(
            grid=grid,
            transport=device.transport(heap, device.streams(), barrier.timeout_s),
            barrier=barrier,
            replicas=Replicas(grid, barrier, heap.device),
        ),
        # FSDP2 orders its own streams and waits for them.
        adds=device.transport(heap, Streams(), barrier.timeout_s),
    )
    engine.divide_factor = factor
    engine.publish()
    with refusing(barrier, _CONNECTED, call=_CALL):
        for each in engine.bridged:
            each.check_layout()
    barrier.exchange(f"{_CALL}: {_CONNECTED}", {})
    _generate_alone(model)
    vars(model)["_odc_engine"] = engine
    if automatic is not None:
        engine.automate(Automatic(model, engine, engine.passes, engine.shards, automatic))
    if grid.rank == 0:
        print(_summary(units, plan, grid, device), file=sys.stderr)
    return model


def _generate_alone(model: nn.Module) -> None:
    """transformers' `generate` has every rank run forwards until the last one has its tokens: here none waits."""
    for module in model.modules():
        generate = getattr(module, "generate", None)
        if callable(generate) and "synced_gpus" in inspect.signature(generate).parameters:
            vars(module)["generate"] = partial(generate, synced_gpus=False)


class BridgedEngine(Protocol):
    """The minibatch protocol over a model of FSDP2, whose parameters the user may tie, replace and hook.

    `adds`: for gradients, on the current stream.
    """

    def __init__(
        self, model: nn.Module, units: list[FsdpUnit], plan: MemoryLayout, wiring: Wiring, *, adds: Transport
    ) -> None:
        super().__init__(wiring)
        self.automatic: Automatic | None = None
        self.passes = Passes(self)
        zeros = ReducedZeros()
        self.bridged = [
            BridgedUnit(
                unit,
                number=number,
                compute=compute,
                gradient=gradient,
                heap=self.heap,
                transport=adds,
                passes=self.passes,
                zeros=zeros,
            )
            for number, (unit, compute, gradient) in enumerate(zip(units, plan.compute, plan.gradient, strict=True))
        ]
        self.shards: list[BridgedParameter] = [each for unit in self.bridged for each in unit.parameters]
        for unit in self.bridged:
            unit.connect()
        self._modules = FsdpModules(model, self)
        self.publication.follow = self._modules.follow
        self.register(
            self.passes,
            RefusesDeterminism(_IN_ANY_ORDER),
            self._modules,
            Trained(self.shards),
            NoSegments(),
        )

    def automate(self, automatic: Automatic) -> None:
        """From now on minibatches begin and end by themselves."""
        self.automatic = automatic
        self.register(automatic)
        self._modules.automate(automatic)


class FsdpModules(Participant):
    """The modules of FSDP2 in the minibatch protocol. Whole parameters come and go by FSDP2's own hooks; hooks on its
    modules report forwards and backwards.
    """

    name = "modules"

    def __init__(self, model: nn.Module, engine: BridgedEngine) -> None:
        self._engine, self._bridged = engine, engine.bridged
        self._automatic: Automatic | None = None
        self._is_torn = False  # a pass began and did not end, and this torch can't reset FSDP2
        self._modules = fsdp_modules(model)
        self.module = self._modules[0]
        found = {id(module): bridged.found for bridged in self._bridged for module in bridged.found.modules}
        for module in self._modules:
            self._watch(module, found.get(id(module)))
        model.register_load_state_dict_post_hook(self._loaded)
        for module in model.modules():
            module.register_state_dict_post_hook(share_versions)

    def _watch(self, module: ModuleOfFsdp, found: FsdpUnit | None) -> None:
        passes, running = self._engine.passes, []
        apart: Any = torch.compiler.disable  # declared as all that it may return

        def check_sync() -> None:
            if found is not None and found.accumulates_here:
                refuse_accumulation(found.name)

        def before_backward() -> None:
            check_sync()
            if self._automatic is not None:
                self._automatic.before_backward()

        @apart
        def before(module: Any, args: Any) -> None:
            self._require_whole()
            if self._automatic is not None:
                self._automatic.before_forward()
            check_sync()
            if not (self._has_run or self._engine.is_open):
                self.follow()
            if found is not None and found.all_reduces:  # also after set_requires_gradient_sync(True)
                module.set_requires_all_reduce(False, recurse=False)
            passes.forward_begins()
            running.append(module)

        @apart
        def after(module: Any, args: Any, output: Any) -> None:
            if not running:  # `before` raised
                return
            running.pop()
            error = sys.exc_info()[1] if output is None else None
            if error is None:
                watch_backward(passes, output, before_backward)
            passes.forward_ends(error)
            if error is not None and not (passes.in_forward or self._engine.is_open):
                self._is_torn |= not hasattr(self.module, "reset_iter_state")  # its own hook did not run
                self.reset()  # as the end of a minibatch does

        module.register_forward_pre_hook(before, prepend=True)
        module.register_forward_hook(after, prepend=True, always_call=True)

    @property
    def _has_run(self) -> bool:
        """Before the root's first forward FSDP2 has no state to reset."""
        return has_run(self.module)

    def automate(self, automatic: Automatic) -> None:
        self._automatic = automatic
        automatic.follow_sync(self._modules)
        self.module.register_forward_hook(self._after_root)

    def _after_root(self, module: Any, args: Any, output: Any) -> None:
        """After an evaluation FSDP2 leaves the root whole, and with `reshard_after_forward=False` all of the model:
        `model.parameters()` would have whole parameters, which clipping would take in place of the sharded ones.
        """
        if not torch.is_grad_enabled():
            for each in self._modules:
                each.reshard()

    def _loaded(self, module: Any, keys: Any) -> None:
        """Publishes what load_state_dict wrote, once no rank is still reading the old values."""
        self._engine.drain("what still reads the parameters")
        self._engine.exchange("load_state_dict", {})
        self._engine.publish()

    def entry(self, given: None) -> None:
        """Raises for what changed since `use_odc` and can't be combined with it."""
        self._require_whole()
        self.follow()
        for each in self._engine.shards:
            each.follow_requires_grad()
        for bridged in self._bridged:
            found = bridged.found
            if found.accumulates_here:
                refuse_accumulation(found.name)
            if found.trained and found.divide_factor is not bridged.undivided:
                raise RuntimeError(
                    f"set_gradient_divide_factor({found.divide_factor}) came after use_odc: give it to use_odc, "
                    f"divide_factor=…"
                )
            if not found.uses(bridged.gather, bridged.reduce):
                raise RuntimeError(
                    f"unit {found.name} communicates in another way since use_odc: leave out set_custom_all_gather and "
                    f"set_custom_reduce_scatter"
                )

    def follow(self) -> None:
        """All parameters are sharded, and FSDP2 has those that the model has: FSDP2 itself would take others that were
        assigned since `use_odc` at its first forward, but `use_odc` has had it look before.
        """
        for module in self._modules:
            module.reshard()  # a root stays whole after an evaluation, and would not be gathered again
        first: dict[int, BridgedParameter] = {}
        for each in self._engine.shards:
            if not self._has_run:
                each.found.adopt()
            each.found.check_conversion()
            same = first.setdefault(id(each.sharded), each)
            each.bind(None if same is each else same)

    def _require_whole(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                f"an earlier pass failed inside FSDP2, which torch {torch.__version__} can't reset (2.13 can): start "
                f"again from the last checkpoint"
            )

    def leave(self) -> None:
        self.reset()

    def exit(self) -> list[int]:
        """The places of tied shards that this rank has touched."""
        return [place for place, each in enumerate(self._engine.shards) if each.tied_to is not None and each.touched]

    def settle(self, messages: list[list[int]] | None) -> None:
        """Adds the gradients of tied shards to that of the one whose `p.grad` they share."""
        for place in sorted(set().union(*messages or ())):
            tied = self._engine.shards[place]
            if tied.tied_to is not None:
                both = [tied.tied_to.own_gradient()], [tied.own_gradient()]
                self._engine.streams.first.compute(partial(torch._foreach_add_, *both))  # pyright: ignore[reportPrivateImportUsage]

    def reduced(self) -> None:
        if self._automatic is not None:
            self._automatic.add_kept()
        for unit in reversed(self._bridged):
            for each in unit.parameters:
                each.run_hooks()

    def reset(self) -> None:
        """Ends the minibatch for FSDP2, also one that failed in the middle of a pass."""
        for bridged in self._bridged:
            bridged.forget()  # reset_iter_state does it from torch 2.15 on
        if not hasattr(self.module, "reset_iter_state"):  # it came with torch 2.13
            self._is_torn |= self._engine.failure is not None
        elif self._has_run:
            try:
                self.module.reset_iter_state()
            except RuntimeError as error:
                raise RuntimeError(
                    f"use_odc was given a part of a model, {type(self.module).__name__}: give it the root"
                ) from error
        for module in self._modules:
            module.reshard()


class NoSegments(Participant):
    """Refuses minibatches that split sequences."""

    name = "split"

    def entry(self, given: Any) -> None:
        if given is not None:
            raise NotImplementedError(
                "this minibatch splits sequences, and the model is one of torch's fully_shard: shard it by "
                "odc_triton.fully_shard, on the same mesh, and call enable_split, or assign whole sequences"
            )


def _check_options(model: Any, divide_factor: Any) -> None:
    require_module(model, _CALL)
    if getattr(model, "_odc_engine", None) is not None:
        raise ValueError(
            f"{type(model).__name__} trains by on-demand communication already, by use_odc or odc_triton.run: call "
            f"use_odc once, before the first forward"
        )
    if divide_factor is not None and not (isinstance(divide_factor, (int, float)) and 0 < divide_factor < float("inf")):
        raise ValueError(f"divide_factor is {divide_factor!r}; it must be a finite number above 0")


def _divide_factor(units: list[FsdpUnit], given: float | None) -> float | None:
    """`given`, or the factor that all units have. Raises ValueError if they differ."""
    factors = {unit.divide_factor for unit in units if unit.trained}
    if given is None and len(factors) > 1:
        raise ValueError(
            f"units have different gradient divide factors, {sorted(map(str, factors))}: give divide_factor"
        )
    return float(given) if given is not None else next(iter(factors), None)


def _plan(units: list[FsdpUnit], grid: Grid, device: Backend) -> MemoryLayout:
    """All units' compute shards, then their gradient shards, in the heap."""

    def place(shards: list[tuple[int, str, int]], offset: int) -> tuple[list[Any], int]:
        wholes = [((elements * grid.shards,), dtype, itemsize) for elements, dtype, itemsize in shards]
        return place_regions(wholes, world=grid.shards, apart=device.apart, offset_bytes=offset)

    read = [(sum(p.gathered_bytes for p in unit.parameters), "uint8", 1) for unit in units]
    added = [
        (sum(p.padded for p in unit.trained), dtype_name(dtype), dtype.itemsize)
        for unit in units
        if (dtype := unit.reduce_dtype) is not None
    ]
    compute, compute_bytes = place(read, 0)
    gradient, size_bytes = place(added, compute_bytes)
    left = iter(gradient)
    return MemoryLayout(
        parameters=tuple(spec for unit in units for spec in unit.specs()),
        compute=tuple(compute),
        gradient=tuple(next(left) if unit.trained else None for unit in units),
        size_bytes=size_bytes,
        compute_bytes=compute_bytes,
    )


def _summary(units: list[FsdpUnit], plan: MemoryLayout, grid: Grid, device: Backend) -> str:
    trained = sum(p.sharded.numel() for unit in units for p in unit.trained)
    every = sum(p.sharded.numel() for unit in units for p in unit.parameters)
    share = 1 if device.apart else grid.shards  # else the plan is of all ranks' memory
    counts = [
        f"{count:,} {noun}{'s' * (count != 1)}"
        for count, noun in ((len(units), "unit"), (grid.shards, "rank"), (grid.replicas, "replica"))
    ]
    ranks = ", ".join(counts[1 : 2 + (grid.replicas > 1)])
    return (
        f"use_odc: {counts[0]}, {len(plan.parameters)} parameters, {every:,} elements ({trained:,} train), on "
        f"{ranks}. Each rank needs, in addition to FSDP2: {plan.compute_bytes // share:,} bytes to read, "
        f"{plan.gradient_bytes // share:,} bytes for gradients"
    )
