"""The first values of the shards: rank 0's tensors, or each module's own initialisation, run once for all ranks."""

from __future__ import annotations

import hashlib
import mmap
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..base.errors import RanksDiffer
from ..comm.barrier import Barrier
from ..comm.memory.heap import SymmetricHeap
from ..comm.relay import Relay
from ..comm.replicas import Replicas
from ..engine.parameter import ShardedParameter
from ..engine.unit import Slot
from ..nn.operand import is_sharded
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
    """Fills all shards and masters, and drops the tensors that they were filled from. Collective.

    All buffers are on the heap's device afterwards. `token`: this replica's. With several replicas, each one's rank 0
    gets the first one's values, parameter by parameter, and hands them on.

    Only rank 0's values count. What rank 0 has on the meta device is initialised by the module that owns it: in a
    transformers model by the nearest model's `_init_weights`, elsewhere by `reset_parameters`. Rank 0 does so unit by
    unit, children first, so that random numbers are drawn in the order of `model.initialize_weights()`, and the
    weights don't depend on the number of ranks. Private memory grows by at most one unit and the root's own
    parameters. Buffers that any rank has on the meta device get rank 0's values there.

    What no initialiser fills is NaN until something is loaded, and a warning names it.

    Raises OdcError on every rank if an initialiser raised, RanksDiffer if buffers differ.
    """
    buffers = {name: (module, key) for name, module, key in _buffers(root)}
    rng_before = torch.get_rng_state()
    messages = barrier.exchange(
        f"{_PURPOSE}: what is on the meta device",
        {
            "buffers": {name: _describe(module._buffers[key]) for name, (module, key) in buffers.items()},
            "rng": hashlib.sha256(rng_before.numpy().tobytes()).hexdigest(),
        },
    )
    wanted = _buffers_to_send([theirs["buffers"] for theirs in messages])
    sizes = [p.leaf.numel() * p.shard.master.dtype.itemsize for p in parameters if p.spec.has_own_master]
    sizes += [module._buffers[key].nbytes for module, key in map(buffers.__getitem__, wanted)]
    relay = Relay(
        purpose=_PURPOSE,
        sizes=sizes,
        token=token,
        barrier=barrier,
        replicas=replicas,
        rank=heap.rank,
        world=heap.world,
    )
    try:
        writer = _Writer(root, found, parameters, relay, is_source=barrier.rank == 0)
        writer.write()
        if wanted:
            relay.before_sending()
        for name in wanted:
            _send_buffer(*buffers[name], relay)
        for module, key in buffers.values():
            module._buffers[key] = module._buffers[key].to(heap.device)
        relay.finish()
        # Ranks that had the same random state keep the same one: rank 0 has drawn for all of them.
        rng = torch.get_rng_state().numpy().tobytes().hex() if barrier.rank == 0 else None
        after = relay.exchange({"rng": rng})[0]["rng"]
        if messages[barrier.rank]["rng"] == messages[0]["rng"]:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(after), dtype=torch.uint8))
    except Exception as error:
        relay.fail(error)
        raise
    finally:
        relay.close()
    if writer.without_initialiser:
        names = writer.without_initialiser
        warnings.warn(
            f"{len(names)} tensors hold NaN until loaded, because their modules have no initialiser here: "
            f"{', '.join(names[:8])}{', …' if len(names) > 8 else ''}. Load a checkpoint; or give the modules a "
            f"reset_parameters(); or, for a transformers model, call fully_shard once on the whole model.",
            stacklevel=4,
        )


def _buffers(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for prefix, module in root.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{key}" if prefix else key, module, key


def _describe(buffer: torch.Tensor) -> list[Any]:
    return [list(buffer.shape), dtype_name(buffer.dtype), buffer.is_meta]


def _buffers_to_send(described: list[dict[str, list[Any]]]) -> list[str]:
    """Names of the buffers that some rank has on the meta device, in the same order on all ranks."""
    wanted = sorted({name for theirs in described for name, (_, _, is_meta) in theirs.items() if is_meta})
    for name in wanted:
        first = described[0].get(name)
        for rank, theirs in enumerate(described):
            if first is None or name not in theirs or theirs[name][:2] != first[:2]:
                raise RanksDiffer(f"buffer {name}: {first} on rank 0 and {theirs.get(name)} on rank {rank}")
    return wanted


def _send_buffer(module: nn.Module, key: str, relay: Relay) -> None:
    buffer = module._buffers[key]
    take = None
    if buffer.is_meta:
        module._buffers[key] = buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
        flat = buffer.view(-1)

        def take(first: int, values: torch.Tensor) -> None:
            flat[first : first + len(values)].copy_(values)

    relay.send(buffer.shape, buffer.dtype, relay.of_first(buffer, buffer.shape, buffer.dtype), take)


class _Writer:
    """Walks the module tree, children first and unit by unit, the same way on every rank.

    While a unit is initialised its modules hold private stand-ins, in the master's dtype. Only what was on the meta
    device is taken from them, so an initialiser can't change values that rank 0 already has. A tied parameter takes
    the values of its first place; its other places draw random numbers too, as they do before they are tied.
    """

    def __init__(
        self,
        root: nn.Module,
        found: list[FoundParameter],
        parameters: list[ShardedParameter],
        relay: Relay,
        *,
        is_source: bool,
    ) -> None:
        self._root, self._relay, self._is_source = root, relay, is_source
        # By unit: where parameters are registered; those whose first place is in it.
        self._places: dict[str, dict[tuple[int, str], tuple[Slot, FoundParameter]]] = defaultdict(dict)
        self._owned: dict[str, list[tuple[FoundParameter, ShardedParameter]]] = defaultdict(list)
        self._drawn: dict[int, nn.Parameter] = {}  # stand-ins whose values are used, by id of their entry
        self._on_meta: set[int] = set()  # modules that own tensors on the meta device
        self._visited: set[int] = set()
        self.without_initialiser: list[str] = []
        for entry, parameter in zip(found, parameters, strict=True):
            self._owned[entry.places[0][2]].append((entry, parameter))
            for module, attribute, unit in entry.places:
                self._places[unit].setdefault((id(module), attribute), (Slot(module, attribute, parameter), entry))
                if entry.value.is_meta:
                    self._on_meta.add(id(module))
        self._on_meta |= {id(module) for _, module, key in _buffers(root) if module._buffers[key].is_meta}
        # A block of a transformers model: its initialiser is in the PreTrainedModel above, out of reach, and
        # nn.Linear's own would be wrong.
        modules = list(root.modules())
        self._out_of_reach = not any(hasattr(module, "_initialize_weights") for module in modules) and any(
            type(module).__module__.startswith("transformers.models.") for module in modules
        )

    def write(self) -> None:
        self._stand_in("")
        self._visit(self._root, "", None)
        self._hand_over("")

    def _visit(self, module: nn.Module, path: str, model: Any) -> None:
        """`model`: the nearest PreTrainedModel at or above `module`."""
        if is_sharded(module) or id(module) in self._visited:
            return
        self._visited.add(id(module))
        if hasattr(module, "_initialize_weights"):
            model = module
        is_unit = path != "" and path in self._places
        if is_unit:
            self._stand_in(path)
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{path}.{name}" if path else name, model)
        if self._is_source and any(id(below) in self._on_meta for below in module.modules()):
            self._initialise(module, path, model)
        if is_unit:
            self._hand_over(path)

    def _stand_in(self, unit: str) -> None:
        places = self._places[unit].values()
        if not self._is_source or not any(id(slot.module) in self._on_meta for slot, _ in places):
            return
        for slot, entry in places:
            if entry.value is None:  # tied to a parameter of a unit that is done
                continue
            stand_in = nn.Parameter(_mapped_like(entry.value), requires_grad=False)
            first_module, first_attribute, _ = entry.places[0]
            if entry.value.is_meta and (slot.module, slot.attribute) == (first_module, first_attribute):
                self._drawn[id(entry)] = stand_in.fill_(torch.nan)
            slot.put(stand_in)

    @torch.no_grad()
    def _initialise(self, module: nn.Module, path: str, model: Any) -> None:
        own = dict(module._buffers)
        for key, buffer in own.items():
            if buffer is not None:
                stand_in = torch.empty_like(buffer, device="cpu")
                module._buffers[key] = stand_in.fill_(torch.nan if stand_in.is_floating_point() else 0)
        if model is not None:
            module._is_hf_initialized = False
            model._initialize_weights(module)
        elif not self._out_of_reach:
            method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(method):
                method()
        for key, buffer in own.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer
            elif buffer is not None and _has_nan(module._buffers[key]):
                self.without_initialiser.append(f"{path}.{key}" if path else key)

    def _hand_over(self, unit: str) -> None:
        """Writes the unit's values into the heap and frees the tensors that held them."""
        self._relay.before_sending()
        for entry, parameter in self._owned[unit]:
            value = None
            if self._is_source:
                value = self._drawn.pop(id(entry), entry.value).detach()
                if entry.value.is_meta and _has_nan(value):
                    self.without_initialiser.append(entry.name)
            value = self._relay.of_first(value, parameter.leaf.shape, parameter.shard.master.dtype)
            if value is not None:
                parameter.shard.fill(value)
            if parameter.spec.has_own_master:
                self._relay.send(parameter.leaf.shape, parameter.shard.master.dtype, value, parameter.shard.adopt)
            parameter.original = weakref.ref(entry.value)
            entry.value = None
        for slot, _ in self._places[unit].values():
            slot.put(slot.parameter.leaf)


def _mapped_like(value: torch.Tensor) -> torch.Tensor:
    """A private tensor in its own mapping: malloc would keep much of what one unit frees from the next."""
    if value.numel() == 0:
        return torch.empty(value.shape, dtype=value.dtype)
    memory = mmap.mmap(-1, value.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=value.dtype).view(value.shape)


def _has_nan(value: torch.Tensor) -> bool:
    return bool(value.sum().isnan())
