"""Finds what to shard in a module: its parameters, their ties and places; refuses what can't be sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..comm.layout import EXACT, ParameterSpec, find_units
from ..engine.module import Engine, ODCModule
from ..engine.parameter import ShardedParameter, has_gradient_hooks
from ..nn.operand import KeepsRows, ReadsOnDemand, Table, kept_dtype

SHARDABLE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class FoundParameter:
    """A parameter before it is sharded. `value` is dropped once its values are in the heap."""

    value: nn.Parameter | None
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str, str]] = field(default_factory=list)  # module, attribute, unit

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def parameter(self) -> nn.Parameter:
        assert self.value is not None, f"{self.name} is in the heap"
        return self.value

    def keeps_rows(self, device_type: str, table: Table) -> bool:
        """True if a rank may keep others' rows of it."""
        return any(
            isinstance(module, KeepsRows) and module.keeps_rows(device_type, table) for module, *_ in self.places
        )

    def is_read_on_demand(self, device_type: str, table: Table) -> bool:
        """True if all modules that have it read its owners on demand, so that it need not be whole."""
        return all(
            isinstance(module, ReadsOnDemand) and attribute in module.reads_on_demand(device_type, table)
            for module, attribute, _ in self.places
        )


def refuse_unshardable(name: str, parameter: nn.Parameter, home: str) -> None:
    """Raises ValueError, with the name and the remedy, for a parameter that can't be split over ranks.

    `home`: the type of device that holds the shards.
    """
    kind = type(parameter).__name__
    if isinstance(parameter, UninitializedParameter):
        raise ValueError(f"{name} is a lazy parameter without a shape; run one forward before fully_shard")
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{name} is a DTensor on {parameter.device_mesh}: tensor, context and pipeline parallel models, and models "
            f"that are sharded already, can't be sharded again. Call fully_shard on the plain model."
        )
    if is_traceable_wrapper_subclass(parameter):
        raise ValueError(
            f"{name} is a {kind}, a tensor subclass: ranks would read its inner tensors, without calling its "
            f"fsdp_pre_all_gather. Leave the conversion (torchao) out, quantise by bitsandbytes, or pass such "
            f"parameters in ignored_params."
        )
    if parameter.dtype not in SHARDABLE_DTYPES and kept_dtype(parameter) is None:
        raise ValueError(
            f"{name} is {kind} of {parameter.dtype}: of quantised parameters only those of bitsandbytes' layers can be "
            f"sharded, and no complex ones. Load the model in bf16 or fp32, or pass them in ignored_params."
        )
    if parameter.device.type not in ("cpu", "meta", home):
        raise ValueError(
            f"{name} is on {parameter.device}: models are sharded from the CPU, the meta device or {home!r}, where "
            f"their shards are. Move the model with .cpu() first, or give another mesh or backend."
        )
    if has_gradient_hooks(parameter):
        raise ValueError(
            f"{name} has gradient hooks (optimizer-in-backward registers such hooks): they would never fire on a "
            f"sharded parameter. Remove them and step the optimizer after the minibatch."
        )


def find_parameters(root: nn.Module, unit_names: list[str], ignored: set[nn.Parameter]) -> list[FoundParameter]:
    """All parameters of `root` in registration order, each with every place where it is registered, or another one of
    the same memory.

    Modules that are sharded already (bottom-up use) are skipped, with all below them. `unit_names`: the
    outermost units; a place outside all of them belongs to the root, "".
    """
    units = set(unit_names)
    ignored_ids = {id(parameter) for parameter in ignored}
    found: dict[Any, FoundParameter] = {}

    def visit(module: nn.Module, prefix: str, unit: str) -> None:
        if isinstance(module, ODCModule):
            return
        if prefix in units:
            unit = prefix
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in ignored_ids:
                continue
            entry = found.setdefault(_memory_of(parameter), FoundParameter(parameter))
            entry.names.append(f"{prefix}.{attribute}" if prefix else attribute)
            entry.places.append((module, attribute, unit))
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}.{name}" if prefix else name, unit)

    visit(root, "", "")
    return list(found.values())


def _memory_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Equal for parameters of the same elements in the same order: those of one memory are one parameter."""
    if type(parameter) is not nn.Parameter or parameter.is_meta or not parameter.numel():
        return (id(parameter),)
    return parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype, parameter.requires_grad


def _refuse_other_views(found: list[FoundParameter]) -> None:
    """Raises ValueError for parameters of the same memory that are not the same elements in the same order."""
    at: dict[int, FoundParameter] = {}
    for entry in found:
        other = at.setdefault(_memory_of(entry.parameter)[0], entry)
        if other is not entry:
            raise ValueError(
                f"{entry.name} is another view of {other.name}'s memory, and would be trained apart from it: make it a "
                f"parameter of its own. If it is of PEFT's LoRA with ensure_weight_tying=True on embeddings, leave "
                f"that out, or name them in modules_to_save"
            )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True, kw_only=True)
class Description:
    """A module's parameters to shard. `specs`: those of the parameters `found`, in their order."""

    found: list[FoundParameter]
    specs: list[ParameterSpec]
    unit_names: list[str]
    is_list: bool  # the module only holds its units together, and is no part of the model
    inner: list[Engine]  # of the submodules that were sharded before
    tied: list[tuple[FoundParameter, ShardedParameter]]  # places of parameters that `inner` already shards
    ignored: set[nn.Parameter]

    def refuse_whole_ties(self, device_type: str) -> None:
        """Raises NotImplementedError for a tie that needs the whole of a parameter that is never whole."""
        for entry, parameter in self.tied:
            if parameter.is_never_whole and not entry.is_read_on_demand(device_type, parameter.table):
                raise NotImplementedError(
                    f"{entry.name} is tied to a weight that was sharded on its own and is never whole: call "
                    f"fully_shard on the module that holds both, not on the tied layer"
                )

    def refuse_useless_cache(self) -> None:
        """Raises ValueError for experts, none of which would read what is kept."""
        for entry in self.found:
            if any(isinstance(module, KeepsRows) for module, *_ in entry.places):
                raise ValueError(
                    f"expert_cache_bytes is given, and {entry.name} is read whole or where it is: give replace_layers "
                    f"choice='experts=triton/staged/fused' or 'experts=triton/direct/fused', or leave it out"
                )

    def forget(self) -> None:
        """Drops the tensors that were found: nothing else may hold them."""
        self.found, self.tied = [], []


def describe(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
    *,
    home: str,
    exact: bool,
    units: list[str] | None = None,
) -> Description:
    """Finds what to shard in `module`, and its units. `home`: the type of device that holds the shards. `exact`:
    gradients are summed as integers. `units`: the names of the units of a `module` that only holds them together.

    Raises ValueError, NotImplementedError for what can't be sharded, with its name and the remedy.
    """
    inner = _inner_engines(module, mesh, exact)
    unit_names = units or ([] if inner else find_units(module))
    known = {id(original): parameter for engine in inner for original, parameter in engine.originals()}
    all_found = find_parameters(module, unit_names, ignored)
    found = [entry for entry in all_found if id(entry.value) not in known]
    for entry in found:
        refuse_unshardable(entry.name, entry.parameter, home)
    _refuse_other_views(found)
    return Description(
        found=found,
        specs=[spec_of(entry, policy, exact=exact) for entry in found],
        unit_names=unit_names,
        is_list=units is not None,
        inner=inner,
        tied=[(entry, known[id(entry.value)]) for entry in all_found if id(entry.value) in known],
        ignored=ignored,
    )


def _inner_engines(module: nn.Module, mesh: DeviceMesh, exact: bool) -> list[Engine]:
    """Engines of the submodules that were sharded before their root."""
    inner: dict[int, Engine] = {}
    below = {id(child) for child in module.modules()}
    for name, child in module.named_modules():
        if not isinstance(child, ODCModule) or id(child._odc_engine) in inner:
            continue
        engine = child._odc_engine
        outside = [unit.name for unit in engine.units if id(unit.module) not in below]
        if outside:
            raise ValueError(
                f"{name} belongs to another sharded model, whose {outside[0] or 'root'} is not part of this "
                f"{type(module).__name__}: a module can have one engine only. Shard the model that holds both."
            )
        if engine.deterministic != exact:
            raise ValueError(
                f"{name} was sharded with exact={not exact}, and its root would be with exact={exact}: give both "
                f"the same"
            )
        for parameter in engine.parameters[:1]:
            assert isinstance(parameter.sharded, DTensor)
            theirs = parameter.sharded.device_mesh
            if theirs.mesh.tolist() != mesh.mesh.tolist():
                raise NotImplementedError(f"{name} was sharded over {theirs}, its root over {mesh}: use one mesh")
        inner[id(engine)] = engine
    return list(inner.values())


def check_policy(mp_policy: Any) -> None:
    """Raises TypeError, ValueError or NotImplementedError for a policy that parameters can't follow."""
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy is a {type(mp_policy).__name__}; give a MixedPrecisionPolicy")
    if getattr(mp_policy, "param_dtype_override_fn", None) is not None:  # there is none before torch 2.15
        raise NotImplementedError(
            "mp_policy has a param_dtype_override_fn, which is not supported, leave it out: param_dtype applies to all "
            "parameters"
        )
    for name in ("param_dtype", "reduce_dtype") if mp_policy is not None else ():
        dtype = getattr(mp_policy, name)
        if dtype is not None and dtype not in SHARDABLE_DTYPES:
            names = ", ".join(dtype_name(each) for each in SHARDABLE_DTYPES)
            raise ValueError(f"mp_policy has {name}={dtype}; it must be one of {names}")


def spec_of(entry: FoundParameter, policy: MixedPrecisionPolicy | None, *, exact: bool = False) -> ParameterSpec:
    """As in FSDP2. Gradients are summed in fp32, or the parameter's dtype if that is wider, unless `policy` has a
    `reduce_dtype`. Raises NotImplementedError for exact sums of float64.
    """
    value = entry.parameter
    if exact and value.requires_grad and value.dtype == torch.float64:
        raise NotImplementedError(
            f"{entry.name} is float64, and exact sums have 54 bits below their bound, not float64's range: leave exact "
            f"out"
        )
    computed, reduced = (policy.param_dtype, policy.reduce_dtype) if policy is not None else (None, None)
    computed = kept_dtype(value) or computed
    reduced = EXACT if exact else dtype_name(reduced or torch.promote_types(torch.float32, value.dtype))
    return ParameterSpec(
        names=tuple(entry.names),
        shape=tuple(value.shape) or (1,),
        is_scalar=not value.shape,
        master_dtype=dtype_name(value.dtype),
        compute_dtype=dtype_name(computed if computed and value.is_floating_point() else value.dtype),
        reduce_dtype=reduced if value.requires_grad else None,
        unit=entry.places[0][2],
    )
