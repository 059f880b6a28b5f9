"""The calls of a training loop on a sharded model, outside of minibatches: publish, full_parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .forward import run_forward
from .minibatch import protocol_of
from .module import Engine, ODCModule


def engine_of(module: nn.Module, call: str = "this call") -> Engine:
    """The engine behind a module that `fully_shard` returned. `call`: for whom, in messages."""
    protocol_of(module)  # raises for one that is not sharded
    if not isinstance(module, ODCModule):
        raise TypeError(
            f"{type(module).__name__} was sharded by torch's fully_shard, and {call} needs a model of "
            f"odc_triton.fully_shard, which takes the same mesh: it is built on that model's own units, not on "
            f"FSDP2's. use_odc makes minibatch, publish and full_parameters work on it"
        )
    return module._odc_engine


def publish(model: nn.Module) -> None:
    """Makes changes to the parameters readable by peers; call it on every rank.

    Only needed after writing parameters by hand (an EMA, `dcp.load` in place), not by `.data`: a forward outside of
    minibatches, `full_parameters`, and with several replicas the next minibatch raise until then. Optimizer steps and
    `load_state_dict` publish too. Before writing, make sure by a barrier that no other rank is still evaluating: fp32
    parameters are read where they are written, also by processes outside of the job (`read_policy`).

    model: what `fully_shard` returned.
    """
    protocol_of(model).publish()


def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The name and the full tensor of every parameter, in the compute dtype, one copy at a time.

    Any single rank may call it: reads are one-sided. After an optimizer step it waits, with the deadline, until every
    owner has stepped.

    model: what `fully_shard` returned.

    Returns an iterator of (name, tensor). Raises RuntimeError if an owner steps again while this rank is still reading.
    """
    yield from protocol_of(model).publication.full_parameters()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of `module` see unsharded parameters, as its forward does. FSDP2's function of that name.

    module: a unit; another module is left alone, as FSDP2 leaves it.
    method_name: the method that is called as `module.method_name(...)`.
    """
    if not isinstance(module, ODCModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise AttributeError(f"{type(module).__name__} has no method {method_name!r}")

    @functools.wraps(method)
    def as_forward(*args: Any, **kwargs: Any) -> Any:
        return run_forward(module._odc_unit, method, args, kwargs)

    setattr(module, method_name, as_forward)
