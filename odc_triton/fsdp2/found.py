"""A model of torch's `fully_shard`: its units, and the layout of a unit's shard.

torch has public hooks for the communication, and nothing public that says which parameters a unit has, in which order,
or which options it was given. So this file reads FSDP2's state, and nothing else does. It changes it only by telling
FSDP2 to look at a module's parameter again (`FsdpParameter.adopt`).

A unit's shard is flat: its parameters' shards one after another, each padded to the first rank's. What is gathered
holds all parameters, in the dtypes that modules compute in; what is reduced holds those that train, in one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Shard

from ..comm.layout import ParameterSpec, rows_per_rank
from ..engine.collectives import RefuseCollectives
from ..engine.shard import DTensorParameter
from ..sharding.collect import dtype_name

if TYPE_CHECKING:

    class ModuleOfFsdp(FSDPModule, nn.Module):
        """What torch's `fully_shard` makes of a module."""
else:
    ModuleOfFsdp = FSDPModule


_DEFAULT_COMMS = ("DefaultAllGather", "DefaultReduceScatter")


@dataclass(frozen=True, kw_only=True, eq=False)
class FsdpParameter:
    """A parameter of a unit. `compute_dtype`: what modules see.

    `reduce_dtype`: what its gradient is summed in, according to its MixedPrecisionPolicy.
    """

    name: str
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype | None
    fsdp: Any = field(repr=False)  # torch's FSDPParam

    @property
    def sharded(self) -> DTensorParameter:
        """The DTensor that optimizers hold."""
        return self.fsdp.sharded_param

    @property
    def registered(self) -> nn.Parameter:
        """The parameter under its name in its module: `sharded`, while the unit is whole the whole one, or another
        that was assigned since.
        """
        return getattr(self.fsdp._module_info.module, self.fsdp._module_info.param_name)

    def adopt(self) -> None:
        """FSDP2 takes what was assigned to the module, as it does before its first forward. Raises RuntimeError for
        what can't take the parameter's place.
        """
        old, new = self.sharded, self.registered
        if new is old:
            return
        shape, placements = tuple(old.shape), old.placements
        same = isinstance(new, DTensor) and new.device_mesh == old.device_mesh and new.placements == placements
        if not same or new.shape != old.shape or new.dtype != old.dtype:
            raise RuntimeError(
                f"{self.name} was replaced after use_odc by a {type(new.data).__name__} of {list(new.shape)} in "
                f"{new.dtype}: assign a DTensor of {list(shape)} in {old.dtype}, split as {placements} on the same mesh"
            )
        self.fsdp.reset_sharded_param()

    @property
    def shard_dim(self) -> int:
        """The dimension that ranks split."""
        return self.sharded.placements[-1].dim  # pyright: ignore[reportAttributeAccessIssue]  # of a Shard

    @cached_property
    def padded(self) -> int:
        """Elements of each rank's shard, with padding: those of the first rank's."""
        world = self.sharded.device_mesh.size(-1)
        shape = list(self.sharded.shape)
        shape[self.shard_dim] = rows_per_rank(shape[self.shard_dim], world)
        return math.prod(shape)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows, as they are now."""
        return cast("DTensor", self.sharded.detach()).to_local()

    @cached_property
    def is_converted(self) -> bool:
        """True if FSDP2 gathers what the rows' `fsdp_pre_all_gather` makes of them (fp8)."""
        return self._converts

    @property
    def _converts(self) -> bool:
        return hasattr(self.sharded._local_tensor, "fsdp_pre_all_gather")  # maybe this object's, not its class's

    def check_conversion(self) -> None:
        """Raises RuntimeError if `fsdp_pre_all_gather` came or went since `use_odc`."""
        if self._converts != self.is_converted:
            raise RuntimeError(f"fsdp_pre_all_gather of {self.name} came or went after use_odc: define it before")

    @torch.no_grad()
    def gathered(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        """This rank's rows as FSDP2 gathers them now, flat, and their dtype. Resharded.

        Raises RuntimeError if their `fsdp_pre_all_gather` communicates.
        """
        if not self.is_converted:
            return [(self.local.reshape(-1), self.compute_dtype)]
        with RefuseCollectives():
            return [(each, each.dtype) for each in self.fsdp.all_gather_inputs]

    @cached_property
    def gathered_bytes(self) -> int:
        """Of each rank."""
        if not self.is_converted:
            return self.padded * self.compute_dtype.itemsize
        return sum(each.nbytes for each, _ in self.gathered())

    def as_dtensor(self, local: torch.Tensor) -> DTensor:
        """This rank's part of a tensor, flat and maybe padded, as a DTensor split like the parameter."""
        shape = self.local.shape
        return DTensor.from_local(
            local[: shape.numel()].view(shape),
            self.sharded.device_mesh,
            self.sharded.placements,
            run_check=False,
            shape=self.sharded.shape,
            stride=self.sharded.stride(),
        )

    def joined(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from all ranks' flat, padded shards: a new one."""
        shape, dim = list(self.sharded.shape), self.shard_dim
        shape[dim] = rows_per_rank(shape[dim], len(shards))
        whole = torch.cat([shard.view(shape) for shard in shards], dim=dim)
        return whole.narrow(dim, 0, self.sharded.shape[dim]).contiguous()


@dataclass(frozen=True, kw_only=True, eq=False)
class FsdpUnit:
    """Parameters that FSDP2 gathers and reduces together. `modules`: those that were given to one `fully_shard`."""

    name: str
    modules: tuple[ModuleOfFsdp, ...]
    parameters: list[FsdpParameter]
    group: Any = field(repr=False)  # torch's FSDPParamGroup

    @cached_property
    def trained(self) -> list[FsdpParameter]:
        return [each for each in self.parameters if each.sharded.requires_grad]

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of the owners' sums: fp32, or the parameters' own if that is wider; None if nothing trains."""
        if not self.trained:
            return None
        return torch.promote_types(self.trained[0].reduce_dtype or self.trained[0].sharded.dtype, torch.float32)

    @property
    def divide_factor(self) -> float | None:
        """The factor of `set_gradient_divide_factor`."""
        return self.group.gradient_divide_factor

    @property
    def accumulates_here(self) -> bool:
        """True if gradients stay on this rank, as after `set_requires_gradient_sync(False)`."""
        return not self.group.reduce_grads

    @property
    def gathers_from_fewer(self) -> bool:
        """True if the backward gathers from some ranks only: `reshard_after_forward` is a number of ranks."""
        return self.group._use_post_forward_mesh

    @property
    def reduces_unused(self) -> bool:
        """True if parameters without a gradient are reduced, too: `set_reduce_scatter_unused_params(True)`."""
        return getattr(self.group, "reduce_scatter_unused_params", False)  # from torch 2.13 on

    @property
    def all_reduces(self) -> bool:
        """True if each backward sums over replicas."""
        return self.group.all_reduce_grads

    def uses(self, gather: Any, reduce: Any) -> bool:
        """True while it communicates by these."""
        return self.group._all_gather_comm is gather and self.group._reduce_scatter_comm is reduce

    def specs(self) -> Iterator[ParameterSpec]:
        """The parameters, as all ranks must agree on them."""
        trained, reduced = set(map(id, self.trained)), self.reduce_dtype
        for each in self.parameters:
            yield ParameterSpec(
                names=(each.name,),
                shape=tuple(each.sharded.shape),
                master_dtype=dtype_name(each.sharded.dtype),
                compute_dtype=dtype_name(each.compute_dtype),
                reduce_dtype=dtype_name(reduced) if reduced is not None and id(each) in trained else None,
                unit=self.name,
            )

    def check(self) -> None:
        """Raises NotImplementedError or ValueError, with the remedy, for what can't be bridged."""
        group = self.group
        if group._all_reduce_hook is not None:
            raise NotImplementedError(
                f"unit {self.name} has an all-reduce hook (set_all_reduce_hook), which would see zeros: change p.grad "
                f"after the minibatch, before the optimizer step, instead"
            )
        for comm in (group._all_gather_comm, group._reduce_scatter_comm):
            if type(comm).__name__ not in _DEFAULT_COMMS:
                raise NotImplementedError(
                    f"unit {self.name} communicates by {type(comm).__name__}: leave out set_custom_all_gather, "
                    f"set_custom_reduce_scatter, set_allocate_memory_from_process_group_for_comm and "
                    f"set_symm_mem_for_comm, and call use_odc once, on the root"
                )
        if self.accumulates_here:
            refuse_accumulation(self.name)
        for each in self.parameters:
            _check_parameter(each, group)
        if len({each.sharded.dtype for each in self.trained}) > 1:
            raise ValueError(f"unit {self.name} trains parameters of several dtypes, which FSDP2 can't reduce together")


def refuse_accumulation(unit: str) -> None:
    """Raises for `set_requires_gradient_sync(False)`."""
    raise NotImplementedError(
        f"set_requires_gradient_sync(False) on unit {unit} (no_sync, or accelerate's accumulate) keeps whole gradients "
        f"on this rank: leave it out. Inside a minibatch every backward adds to the owners' shards without a collective"
    )


def _check_parameter(found: FsdpParameter, group: Any) -> None:
    sharded, name = found.sharded, found.name
    if sharded.is_meta:
        raise ValueError(f"{name} is on the meta device: call to_empty(device=…) and write its values before use_odc")
    if isinstance(group.offload_policy, CPUOffloadPolicy):  # frameworks pass None for none
        raise NotImplementedError(f"{name} is offloaded to the CPU: leave out offload_policy")
    try:
        found.gathered()
    except RuntimeError as error:
        raise NotImplementedError(
            f"{name} can't be gathered without the other ranks: its fsdp_pre_all_gather raised {error}. Gather in "
            f"bf16, MixedPrecisionPolicy(param_dtype=torch.bfloat16), or compute scales after the optimizer step"
        ) from error
    if sharded.requires_grad and not found.compute_dtype.is_floating_point:
        raise NotImplementedError(f"{name} trains and is {found.compute_dtype}")


def find_units(model: nn.Module) -> list[FsdpUnit]:
    """The units of a model of torch's `fully_shard`, in the order of its modules. Raises TypeError for another model,
    RuntimeError for a torch that keeps its state elsewhere.
    """
    modules = fsdp_modules(model)
    names = {id(module): name for name, module in model.named_modules()}
    kept = {id(parameter) for parameter in model.parameters()}
    units: dict[int, FsdpUnit] = {}
    try:
        for module in modules:
            for group in _groups(module):
                if id(group) not in units:
                    together = tuple(getattr(group, "modules", (module,)))
                    unit = ", ".join(names[id(each)] or "the root" for each in together)
                    units[id(group)] = FsdpUnit(
                        name=unit, modules=together, parameters=_parameters(group, names, kept), group=group
                    )
        for unit in units.values():
            unit.check()
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} keeps FSDP2's state elsewhere ({error}): use_odc knows torch 2.11 to 2.15"
        ) from error
    return list(units.values())


def fsdp_modules(model: nn.Module) -> list[ModuleOfFsdp]:
    """The modules that torch's `fully_shard` was called on, resharded. Raises TypeError if the root is none of them."""
    if not isinstance(model, FSDPModule):
        raise TypeError(
            f"{type(model).__name__} is not sharded by torch's fully_shard: call it on the model (units first, then "
            f"the root), or shard by odc_triton.fully_shard"
        )
    modules = [cast("ModuleOfFsdp", each) for each in model.modules() if isinstance(each, FSDPModule)]
    for module in modules:
        module.reshard()  # a root stays whole after an evaluation
    return modules


@contextmanager
def syncing(model: nn.Module, on: bool) -> Iterator[None]:
    """If `on`, `set_requires_gradient_sync(True)`, which an error undoes."""
    groups = [group for module in fsdp_modules(model) for group in _groups(module)] if on else []
    before = [(group, group.reduce_grads, group.all_reduce_grads) for group in groups]
    for group in groups:
        group.reduce_grads = group.all_reduce_grads = True
    try:
        yield
    except BaseException:
        for group, reduces, all_reduces in before:
            group.reduce_grads, group.all_reduce_grads = reduces, all_reduces
        raise


def has_run(module: ModuleOfFsdp) -> bool:
    """True after FSDP2 has run a forward of which `module` is the root, or a part."""
    return module._get_fsdp_state()._is_root is not None


def comms_of(model: nn.Module) -> list[Any]:
    """How each unit communicates."""
    groups = [group for module in fsdp_modules(model) for group in _groups(module)]
    return [comm for group in groups for comm in (group._all_gather_comm, group._reduce_scatter_comm)]


def roots_of(parameters: Iterable[nn.Parameter]) -> list[ModuleOfFsdp]:
    """The outermost modules of this process that FSDP2 has sharded and that have any of these parameters."""
    wanted, sharded = set(map(id, parameters)), list(_composable_state._module_state_mapping)
    those = [each for each in sharded if isinstance(each, FSDPModule) and wanted & set(map(id, each.parameters()))]
    inner = {id(each) for module in those for each in module.modules() if each is not module}
    return [cast("ModuleOfFsdp", module) for module in those if id(module) not in inner]


def replace_comms(model: nn.Module, new: Callable[[Any, str], Any]) -> None:
    """Each unit gathers and reduces by `new(old, label)` from now on. Raises TypeError as `fsdp_modules`."""
    groups = {id(group): group for module in fsdp_modules(model) for group in _groups(module)}
    for group in groups.values():
        group._all_gather_comm = new(group._all_gather_comm, "all-gather")
        group._reduce_scatter_comm = new(group._reduce_scatter_comm, "reduce-scatter")


def mesh_of(model: nn.Module) -> DeviceMesh:
    """The mesh of all parameters. Raises TypeError for a model that FSDP2 has not sharded, NotImplementedError for
    meshes that can't be served.
    """
    fsdp_modules(model)
    sharded = {name: each for name, each in model.named_parameters() if isinstance(each, DTensor)}
    for name, each in sharded.items():
        mesh, placements = each.device_mesh, each.placements
        if mesh.ndim > 2 or not isinstance(placements[-1], Shard) or not all(p.is_replicate() for p in placements[:-1]):
            raise NotImplementedError(
                f"{name} is split as {placements} over a mesh of dimensions {mesh.mesh_dim_names or mesh.ndim}: give "
                f"fully_shard a mesh of one dimension, or of two, replicate and shard. Tensor and expert parallelism "
                f"can't be combined with on-demand communication"
            )
        if mesh.ndim == 2 and mesh.size(-1) == 1:
            raise NotImplementedError(
                f"{name} is replicated over {mesh.size(0)} ranks and split over one: shard over at least two ranks, or "
                f"use DistributedDataParallel"
            )
    meshes = list(dict.fromkeys(each.device_mesh for each in sharded.values()))
    if not meshes:
        raise ValueError(f"{type(model).__name__} has no sharded parameter")
    if len(meshes) > 1:
        raise NotImplementedError(
            f"the model's parameters are on {len(meshes)} meshes, {meshes}, as for expert parallelism, which can't be "
            f"combined with on-demand communication: give all units one"
        )
    return meshes[0]


def _groups(module: ModuleOfFsdp) -> list[Any]:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # from torch 2.13 on
    return list(several) if several is not None else [each for each in (state._fsdp_param_group,) if each is not None]


def _parameters(group: Any, names: dict[int, str], kept: set[int]) -> list[FsdpParameter]:
    """`names`: of all modules, by id; `kept`: ids of the model's parameters."""
    found = []
    for each in group.fsdp_params:
        sharded, module = each.sharded_param, each._module_info.module
        policy = each.mp_policy if hasattr(each, "mp_policy") else group.mp_policy  # each has one from torch 2.15 on
        wanted = policy.param_dtype if sharded.is_floating_point() else None
        parameter = FsdpParameter(
            name=".".join(filter(None, (names.get(id(module)), each._module_info.param_name))),
            fsdp=each,
            compute_dtype=wanted or sharded.dtype,
            reduce_dtype=policy.reduce_dtype,
        )
        if id(module) in names and not group._reset_sharded_params:  # as FSDP2 does at its first forward
            parameter.adopt()
            each._init_extensions()
        if id(module) not in names or id(parameter.sharded) not in kept:
            raise ValueError(
                f"FSDP2 has a parameter of {list(sharded.shape)} that the model does not have any more: shard the "
                f"model after changing it"
            )
        found.append(parameter)
    return found
