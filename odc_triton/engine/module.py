"""The engine of a sharded module, and the methods that the module gets.

Each method of FSDP2's `FSDPModule` works, is a documented no-op, or is refused.
"""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.tensor import DTensor

from ..machine.topology import Place
from .borrowed import BorrowedShard
from .collectives import NoCollectives
from .exact import ExactSums
from .forward import run_forward
from .member import Wiring
from .minibatch import DividedAlike, RefusesDeterminism, Trained
from .parameter import ShardedParameter
from .protocol import Protocol
from .unit import Passes, Unit

_IN_ANY_ORDER = (
    "torch.use_deterministic_algorithms(True) came after fully_shard, and this model's gradients are added in the "
    "order of their arrival: set it before, or give fully_shard(model, exact=True)"
)


class Engine(Protocol):
    """One sharded model on one rank: its units and parameters, which take part in the minibatch protocol.

    `deterministic`: sums of gradients have the same bits in whatever order ranks add, by exact.py. `debug`: refuses
    collectives inside a minibatch.
    """

    def __init__(self, wiring: Wiring, *, deterministic: bool, debug: bool) -> None:
        super().__init__(wiring)
        self.deterministic = deterministic
        self.units: list[Unit] = []
        self.parameters: list[ShardedParameter] = []  # those of `shards`, in their order
        self.ignored: dict[int, nn.Parameter] = {}  # fully_shard's ignored_params, by id
        self.place: Callable[[], Place] | None = None  # under which what was measured on such ranks is kept
        self.passes = Passes(self, units=self.units, parameters=self.parameters, ignored=self.ignored)
        self.register(
            *([NoCollectives()] if debug else []),
            self.passes,
            Trained(self.shards),
            DividedAlike(self.units),
            ExactSums(self.shards, self) if deterministic else RefusesDeterminism(_IN_ANY_ORDER),
        )

    def add(self, parameters: list[ShardedParameter]) -> None:
        for parameter in parameters:
            self.parameters.append(parameter)
            self.shards.append(parameter.shard)
            self.streams.watch(parameter.staging)
            if parameter.trains:
                parameter.listen(self.passes)
        self.reads_only = not self.trainable()
        rows = [each.rows for each in self.parameters if each.rows is not None]
        for each in rows:
            each.slots = rows[0].slots  # also of those that were sharded before
        if any(each.keeps for each in rows):
            from .kept import KeptRows

            if self.participant(KeptRows) is None:
                self.register(KeptRows(self.parameters, self.drain))

    def absorb(self, inner: Engine) -> None:
        """Takes over a submodule that was sharded before its root; its parameters stay where they are."""
        for unit in inner.units:
            unit.join(self.passes)
            vars(unit.module)["_odc_engine"] = self
        self.units += inner.units
        self.ignored |= inner.ignored
        self.streams.join(inner.streams)
        self.add(inner.parameters)
        inner.optimizers.stop()

    def name_parameters(self, root: nn.Module) -> None:
        """Names every parameter as seen from the root."""
        names = {id(value): name for name, value in root.named_parameters()}
        for shard in self.shards:
            shard.name = names[id(shard.sharded)]

    def originals(self) -> Iterator[tuple[nn.Parameter, ShardedParameter]]:
        """Parameters as they were before sharding, where something still holds them: a tie into this module."""
        for parameter in self.parameters:
            original = parameter.original() if parameter.original is not None else None
            if original is not None:
                yield original, parameter


class DoneHandle:
    """Returned by `unshard` and `finalize_backward` with `async_op=True`; there is nothing to wait for."""

    def wait(self) -> None:
        pass


def _refuse(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(f"{name} has no meaning under on-demand communication: {instead}")


class ODCModule(nn.Module if TYPE_CHECKING else object):
    """Mixed into the class of every module that `fully_shard` was called on, and of the units it found."""

    _odc_unit: Unit
    _odc_engine: Engine
    _odc_is_sharded = True

    def __new__(cls, *args: Any, **kwargs: Any) -> nn.Module:
        """Makes a module of the original class, as FSDP2 does: slicing an nn.Sequential calls self.__class__."""
        original: Any = cls.__mro__[2]  # as in `plain_class`
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    # ---- done

    def unshard(self, async_op: bool = False) -> DoneHandle | None:
        """Makes this unit's parameters whole until `reshard()` or the end of the minibatch.

        On a GPU `reshard()` frees their memory: finish the backward of anything computed from them first, and don't
        use views of them afterwards.
        """
        if not self._odc_engine.is_open:
            self._odc_engine.publication.wait_readable()
        self._odc_unit.hold()
        return DoneHandle() if async_op else None

    def reshard(self) -> None:
        """Puts the sharded parameters back."""
        self._odc_unit.release()

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides gradients by `factor` when they are reduced, instead of by 1 (`tokens` given) or the world size.

        On the root it is for all units. A minibatch raises ValueError if units have different ones.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"factor is {factor}; it must be finite and above 0")
        for unit in self._odc_engine.units if self._odc_unit.is_root else [self._odc_unit]:
            unit.divide_factor = float(factor)
        self._odc_engine.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """FSDP2's older name for `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets if whole parameters are freed between forward and backward. On the CPU they are views: no effect."""
        for module in self.modules() if recurse else [self]:
            if isinstance(module, ODCModule):
                module._odc_unit.reshard_after_forward = reshard_after_forward

    def reset_iter_state(self) -> None:
        """No-op: a minibatch that failed leaves no state behind; just enter the next one."""

    # ---- no-ops: schedules of collectives that don't exist here

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No-op: every backward adds into the owners' shards."""

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """No-op: the end of the minibatch ends its backwards."""

    def finalize_backward(self, *, async_op: bool = False) -> DoneHandle | None:
        """No-op: a unit is resharded when its backward ends, and gradients are reduced when the minibatch ends."""
        return DoneHandle() if async_op else None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """No-op: gradients are synchronised once, when the minibatch ends, however many microbatches it had."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """No-op: gradients are summed over replicas once, when the minibatch ends."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """No-op: a unit's whole parameters are always freed when its backward ends."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No-op: a unit's parameters are whole in its backward."""

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """No-op: what is fetched ahead follows the order of the last microbatch."""

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """No-op, see `set_modules_to_forward_prefetch`."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No-op: parameters and gradients are in symmetric memory from the start."""

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """No-op, see `set_allocate_memory_from_process_group_for_comm`."""

    def set_post_optim_event(self, event: Any) -> None:
        """No-op: readers wait until the weights are published, after the optimizer step."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """No-op: there is no reduce-scatter, so it has no input buffers."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """No-op, see `set_reduce_scatter_max_input_buffers`."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """No-op: a parameter's gradient is the sum over the ranks that used it, None on all if none did."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No-op: owners always sum."""

    # ---- refused

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Refused if `keep`: on a GPU a unit gets new memory whenever it is gathered. False is what happens anyway."""
        if keep:
            _refuse("set_keep_unsharded_storage(True)", "`unshard()` keeps a unit's memory until `reshard()`")

    def set_custom_all_gather(self, comm: Any) -> NoReturn:
        _refuse("set_custom_all_gather", "no all-gather takes place")

    def set_custom_reduce_scatter(self, comm: Any) -> NoReturn:
        _refuse("set_custom_reduce_scatter", "no reduce-scatter takes place")

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> NoReturn:
        _refuse("set_all_reduce_hook", "change `p.grad` after the minibatch, before the optimizer step")

    # ---- nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_forward(self._odc_unit, super().__call__, args, kwargs)

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise TypeError("a sharded model can't be copied; build a second model and load full_parameters(model) into it")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a sharded model can't be pickled; save its state_dict() with torch.distributed.checkpoint")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ODCModule:
        """`.to()`, `.cpu()`, `.to_empty()`, …: moves buffers; refused if parameters would leave the heap."""
        ours = {id(p) for parameter in self._odc_engine.parameters for p in (parameter.sharded, parameter.leaf)}
        for name, parameter in self.named_parameters():
            if id(parameter) in ours:
                probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
                if (probe.dtype, probe.device) != (parameter.dtype, parameter.device):
                    raise RuntimeError(
                        f"{name} is {parameter.dtype} on {parameter.device} and would become {probe.dtype} on "
                        f"{probe.device}: a sharded parameter can't leave the ranks' shared memory. Convert the model "
                        f"before fully_shard, or pass mp_policy=MixedPrecisionPolicy(param_dtype=…)."
                    )
        for parameter in self.parameters():
            if id(parameter) not in ours:  # ignored_params
                parameter.data = fn(parameter.data)
        for module in self.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> ODCModule:
        """No-op: nothing is on the meta device any more, and what `fully_shard` initialised is kept."""
        home = self._odc_engine.heap.device
        if torch.device(device).type != home.type:
            raise RuntimeError(
                f"to_empty(device={device!r}): a sharded model can't leave the ranks' shared memory on {home}"
            )
        return self

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As `nn.Module`'s, from DTensors or from whole tensors; then publishes. `assign=True` is refused.

        Collective: a barrier comes before the first write, as a slower rank may still be reading the parameters.
        """
        if assign:
            raise RuntimeError("load_state_dict(assign=True) would replace the heap's memory; leave assign out")
        self._odc_engine.refuse_in_child("load_state_dict")
        if self._odc_engine.is_open:
            raise RuntimeError("load_state_dict inside a minibatch: peers are reading the parameters")
        for unit in self._odc_engine.units:  # `unshard()` shows whole tensors, which can't be loaded into
            unit.reset()
        parameters = {id(parameter.sharded): parameter for parameter in self._odc_engine.parameters}
        local = OrderedDict(state_dict)
        if hasattr(state_dict, "_metadata"):  # versions of the modules' formats
            vars(local)["_metadata"] = state_dict._metadata
        for name, sharded in self.named_parameters(remove_duplicate=False):
            name = name if name in local else below_wrappers(name)
            value, parameter = local.get(name), parameters.get(id(sharded))
            if value is not None and parameter is not None and isinstance(parameter.shard, BorrowedShard):
                self._odc_engine.refuse_borrowed(
                    f"load_state_dict with {name}", "leave it out, or load it into the base"
                )
            if parameter is not None and _is_whole(value, parameter):
                local[name] = parameter.shard.own_part(value)
        self._odc_engine.drain("what still reads the parameters")
        self._odc_engine.exchange("load_state_dict", {})
        with self._odc_engine.publication.writing():
            return super().load_state_dict(local, strict=strict)


def _save_pretrained(model: nn.Module, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' and PEFT's, of the whole tensors given as `state_dict`; refused without, as it sees shards."""
    if kwargs.get("state_dict") is None:
        raise RuntimeError(
            "save_pretrained of a sharded model would write this rank's shards: call "
            "odc_triton.checkpoint.save_pretrained(model, folder, tokenizer) on rank 0, or give whole tensors, "
            "state_dict=get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))"
        )
    plain: Any = plain_class(model)
    name, model.__class__.__name__ = model.__class__.__name__, plain.__name__  # written as the architecture
    try:
        return plain.save_pretrained(model, folder, *args, **kwargs)
    finally:
        model.__class__.__name__ = name


def _resize_token_embeddings(model: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    """transformers' and PEFT's; shards can't grow."""
    raise NotImplementedError("resize_token_embeddings of a sharded model: call it before fully_shard")


def _is_whole(value: Any, parameter: ShardedParameter) -> TypeGuard[torch.Tensor]:
    """True for a whole tensor; a scalar's may be 0-d, or of the shape (1,) in which it is sharded."""
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_plain and value.shape in (parameter.leaf.shape, parameter.sharded.shape)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class that a sharded module had before `attach` mixed ODCModule into it."""
    return type(module).__mro__[2]


def below_wrappers(name: str) -> str:
    """The name without what torch's checkpoint_wrapper and torch.compile add to it: as in torch's checkpoints."""
    return re.sub(r"\b(_checkpoint_wrapped_module|_orig_mod)\.", "", name)


@functools.cache
def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """One class for all modules of a kind: `torch.compile` makes a graph for each class."""
    members: dict[str, Any] = {"__module__": cls.__module__}
    for name, ours in (("save_pretrained", _save_pretrained), ("resize_token_embeddings", _resize_token_embeddings)):
        if hasattr(cls, name):
            members[name] = ours
    return type(f"ODC{cls.__name__}", (ODCModule, cls), members)


def attach(module: nn.Module, unit: Unit, engine: Engine) -> None:
    """Gives `module` the methods of ODCModule, as FSDP2 does: by a class made of both.

    The mark in torch's registry is what `replicate` leaves modules out by; it would broadcast rank 0's shards.
    """
    module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())["fully_shard"] = RegistryItem()
    module.__class__ = _sharded_class(type(module))
    vars(module).update(_odc_unit=unit, _odc_engine=engine)
