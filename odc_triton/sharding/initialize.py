"""The first values of the shards: rank 0's tensors, or each module's own initialisation, run once for all ranks.

Unit by unit, rank 0 writes whole parameters, in the masters' dtype, into memory that all ranks read, and each rank
copies its rows into its masters. On the CPU, masters that are not separate are the heap itself: nothing is copied.
"""

from __future__ import annotations

import warnings
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..base.errors import RanksDiffer
from ..base.untyped import untyped
from ..comm.barrier import Barrier
from ..comm.layout import place_regions
from ..comm.memory.heap import SharedMemoryHeap, SymmetricHeap
from ..comm.replicas import Replicas
from ..engine.module import ODCModule
from ..engine.parameter import Residency, ShardedParameter, Slot
from ..nn.operand import kept_dtype
from .agree import look_for, refusing
from .collect import FoundParameter, dtype_name

_PURPOSE = "initial values"


def write_initial_values(
    root: nn.Module,
    found: list[FoundParameter],
    parameters: list[ShardedParameter],
    barrier: Barrier,
    replicas: Replicas,
    token: str,
    heap: SymmetricHeap,
) -> None:
    """Fills all masters, to be published, and drops the tensors that they were filled from. Collective.

    All buffers are on the heap's device afterwards. `token`: this replica's.

    Only rank 0's values count. What rank 0 has on the meta device is initialised by the module that owns it: in a
    transformers model by the nearest model's `_init_weights`, elsewhere by `reset_parameters`. Rank 0 does so unit by
    unit, children first, so that random numbers are drawn in the order of `model.initialize_weights()`, and the
    weights don't depend on the number of ranks. Memory grows by at most one unit and the root's own parameters.
    Buffers that any rank has on the meta device get rank 0's values there.

    What no initialiser fills is NaN until something is loaded, and a warning names it. Packed layers are 0 until then,
    and parameters that transformers' `_is_hf_initialized` marks.

    Raises RanksDiffer if rank 0's initialisers raised, on the other ranks, or if buffers differ.
    """
    random_state = torch.get_rng_state()
    buffers = _buffers(root)
    wanted = [buffers[name] for name in _on_meta_of_any_rank(buffers, barrier)]
    relay = _Relay(token=token, heap=heap, barrier=barrier, replicas=replicas)
    with refusing(barrier, _PURPOSE):
        writer = _Writer(root, found, parameters, relay)
        writer.visit(root, "", None)
        of_buffers = [module.get_buffer(key) for module, key in wanted]
        *values, state_before, state_after = relay.send([*of_buffers, random_state, torch.get_rng_state()])
        for (module, key), value in zip(wanted, values, strict=True):
            if module.get_buffer(key).is_meta:
                module._buffers[key] = value.clone()
        for module, key in buffers.values():
            module._buffers[key] = module.get_buffer(key).to(heap.device)
        # Ranks that had the same random state keep the same one: rank 0 has drawn for all of them.
        if torch.equal(random_state, state_before):
            torch.set_rng_state(state_after.clone())
        relay.all_came()
    if names := writer.without_initialiser:
        warnings.warn(
            f"{len(names)} tensors hold NaN until loaded, because their modules have no initialiser here: "
            f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}. Load a checkpoint; or give the modules a "
            f"reset_parameters(); or, for a transformers model, call fully_shard once on the whole model.",
            stacklevel=3,
        )


def _buffers(root: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """By name: the module that has it, and its key there."""
    return {
        f"{prefix}.{key}" if prefix else key: (module, key)
        for prefix, module in root.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    }


def _on_meta_of_any_rank(buffers: dict[str, tuple[nn.Module, str]], barrier: Barrier) -> list[str]:
    """Names of buffers, in the same order on all ranks. Collective. Raises RanksDiffer if one differs between ranks."""
    mine = {name: module.get_buffer(key) for name, (module, key) in buffers.items()}
    described = {name: f"{dtype_name(buffer.dtype)} {list(buffer.shape)}" for name, buffer in mine.items()}
    on_meta = [name for name, buffer in mine.items() if buffer.is_meta]
    of_ranks = barrier.exchange(f"{_PURPOSE}: what is on the meta device", {"buffers": described, "on_meta": on_meta})
    names = sorted({name for theirs in of_ranks for name in theirs["on_meta"]})
    for name in names:
        first, *others = [theirs["buffers"].get(name) for theirs in of_ranks]
        for rank, other in enumerate(others, 1):
            if other != first:
                raise RanksDiffer(f"buffer {name}: {first} on rank 0 and {other} on rank {rank}")
    return names


class _Relay:
    """Brings tensors of rank 0 of the first replica to all ranks, which make the same calls in the same order.

    `heap`: of this replica's ranks; `barrier`: of all replicas'. The ranks of a replica share the memory; each other
    replica's rank 0 gets the values from the first one's.
    """

    def __init__(self, *, token: str, heap: SymmetricHeap, barrier: Barrier, replicas: Replicas) -> None:
        self.is_source = barrier.rank == 0
        self._token, self._heap, self._barrier, self._replicas = token, heap, barrier, replicas
        self.all_came = partial(barrier.exchange, f"fully_shard: {_PURPOSE}", {})

    def allocate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of these shapes and dtypes, on the host, that the replica's ranks share until all drop them."""
        if not tensors:
            return []
        described = [(tuple(each.shape), dtype_name(each.dtype), each.itemsize) for each in tensors]
        regions, size_bytes = place_regions(described, world=1, apart=False)
        self.all_came()  # nobody waits for the memory of a rank that failed
        memory = SharedMemoryHeap(
            rank=self._heap.rank,
            world=self._heap.world,
            size_bytes=size_bytes,
            token=f"{self._token}-{self._barrier.passed}",
            timeout_s=self._barrier.timeout_s,
            look=partial(look_for, self._barrier, self._heap.first, _PURPOSE),
        )
        memory.close()  # its tensors stay
        return [memory.whole(region) for region in regions]

    def publish(self, shared: Sequence[torch.Tensor]) -> None:
        """The source has written these tensors, which a replica's ranks share: afterwards all ranks may read them."""
        if self._replicas.count > 1:
            self.all_came()  # nobody waits in a collective for a rank that failed
            for tensor in shared if self._heap.rank == 0 else ():
                self._replicas.broadcast(tensor)
        self.all_came()

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The source's `tensors`, to be read only. Other ranks give tensors of the same shapes and dtypes."""
        shared = self.allocate(tensors)
        if self.is_source:
            for into, tensor in zip(shared, tensors, strict=True):
                into.copy_(tensor)
        self.publish(shared)
        return shared


@dataclass(slots=True)
class _InitialValue:
    """`whole`: the tensor that rank 0 writes and all ranks read. `drawn`: the parameter over it that its first module
    initialises on rank 0, which may assign other memory to its data. Both only while its unit is initialised.
    """

    found: FoundParameter
    parameter: ShardedParameter
    whole: torch.Tensor = field(init=False)
    drawn: nn.Parameter | None = None

    @property
    def in_heap(self) -> bool:
        """True if its whole tensor in the heap consists of its masters."""
        return self.parameter.residency is Residency.VIEW and not self.parameter.spec.has_own_master


class _Writer:
    """Walks the module tree, children first and unit by unit, the same way on every rank.

    While a unit is initialised, rank 0's modules hold the `whole` tensors of its parameters. What was not on the meta
    device is copied into them afterwards, so an initialiser can't change values that rank 0 already has. A tied
    parameter takes the values of its first place; its other places draw random numbers too, as they do before they are
    tied.
    """

    def __init__(
        self, root: nn.Module, found: list[FoundParameter], parameters: list[ShardedParameter], relay: _Relay
    ) -> None:
        self._relay = relay
        # By unit: where parameters are registered; those whose first place is in it.
        self._places: dict[str, list[tuple[Slot, _InitialValue]]] = defaultdict(list)
        self._owned: dict[str, list[_InitialValue]] = defaultdict(list)
        self._visited: set[nn.Module] = set()
        self.without_initialiser: list[str] = []
        # Modules that own tensors on the meta device.
        self._on_meta = {module for module, key in _buffers(root).values() if module.get_buffer(key).is_meta}
        for entry in map(_InitialValue, found, parameters):
            self._owned[entry.parameter.spec.unit].append(entry)
            for module, attribute, unit in entry.found.places:
                self._places[unit].append((Slot(module, attribute, entry.parameter), entry))
                if entry.found.parameter.is_meta:
                    self._on_meta.add(module)
        kept = (entry for entry in found if kept_dtype(entry.parameter) is not None)
        self._packed = {module for entry in kept for module, *_ in entry.places}
        modules = list(root.modules())
        # A block of a transformers model: its initialiser is in the PreTrainedModel above, out of reach, and
        # nn.Linear's own would be wrong.
        self._out_of_reach = not any(hasattr(module, "_initialize_weights") for module in modules) and any(
            type(module).__module__.startswith("transformers.models.") for module in modules
        )

    @torch.no_grad()
    def visit(self, module: nn.Module, path: str, model: Any) -> None:
        """`path`: its name in the root; `model`: the nearest PreTrainedModel at or above it."""
        if isinstance(module, ODCModule) or module in self._visited:
            return
        self._visited.add(module)
        if hasattr(module, "_initialize_weights"):
            model = module
        is_unit = path in self._places
        if is_unit:
            self._allocate(path)
        for name, child in module._modules.items():
            if child is not None:
                self.visit(child, f"{path}.{name}" if path else name, model)
        if self._relay.is_source and not self._on_meta.isdisjoint(module.modules()):
            self._initialise(module, path, model)
        if is_unit:
            self._fill(path)

    def _allocate(self, unit: str) -> None:
        """Allocates the unit's `whole` tensors and puts them into its modules."""
        own = self._owned[unit]
        shared = iter(self._relay.allocate([entry.found.parameter for entry in own if not entry.in_heap]))
        for entry in own:
            entry.whole = entry.parameter.leaf.data if entry.in_heap else next(shared)
        if not self._relay.is_source or self._on_meta.isdisjoint(slot.module for slot, _ in self._places[unit]):
            return
        for slot, entry in self._places[unit]:
            value = entry.found.value
            if value is None:  # tied to a parameter of a unit that is done
                continue
            is_first = (slot.module, slot.attribute, unit) == entry.found.places[0]
            is_left = slot.module in self._packed or getattr(value, "_is_hf_initialized", False)
            tensor = entry.whole if is_first or is_left else torch.empty_like(value, device="cpu")
            stand_in = nn.Parameter(tensor.fill_(0 if is_left else torch.nan), requires_grad=False)
            untyped(stand_in)._is_hf_initialized = is_left  # transformers initialises no such one
            if is_first:
                entry.drawn = stand_in
            slot.put(stand_in)

    def _initialise(self, module: nn.Module, path: str, model: Any) -> None:
        buffers = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
        for key, buffer in buffers.items():
            unset = torch.nan if buffer.is_floating_point() else 0
            module._buffers[key] = torch.full_like(buffer, unset, device="cpu")
        if model is not None:
            untyped(module)._is_hf_initialized = False
            model._initialize_weights(module)
        elif not self._out_of_reach:
            method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(method):
                method()
        for key, buffer in buffers.items():
            if not buffer.is_meta:
                module._buffers[key] = buffer
            elif _has_nan(module.get_buffer(key)):
                self.without_initialiser.append(f"{path}.{key}" if path else key)

    def _fill(self, unit: str) -> None:
        """Fills the unit's shards from its `whole` tensors, and puts the sharded parameters into its modules."""
        own = self._owned[unit]
        for entry in own:
            found = entry.found.parameter
            if self._relay.is_source:
                is_meta = found.is_meta
                value = entry.drawn if is_meta else found
                assert value is not None, f"the source has not initialised {entry.found.name}"
                if value.data_ptr() != entry.whole.data_ptr():
                    entry.whole.copy_(value)
                if is_meta and _has_nan(entry.whole):
                    self.without_initialiser.append(entry.found.name)
                if entry.parameter.residency is Residency.VIEW and not entry.in_heap:
                    entry.parameter.leaf.data.copy_(entry.whole)  # a parent's initialiser may read it
            entry.parameter.original = weakref.ref(found)
            entry.found.value = entry.drawn = None
        for slot, _ in self._places[unit]:
            slot.put(slot.parameter.leaf)
        self._relay.publish([entry.whole for entry in own])
        for entry in own:
            if not entry.in_heap:
                entry.parameter.shard.adopt(entry.whole)
            del entry.whole


def _has_nan(value: torch.Tensor) -> bool:
    return bool(value.sum().isnan())
