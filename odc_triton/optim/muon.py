"""Muon on a sharded model: whole matrices are read from their owners, not gathered.

    B <- momentum B + (1 - momentum) G        by rows, on their owners
    U  = G + momentum (B - G)                 by rows, published in bf16; without nesterov U = B
    O  = NewtonSchulz(U)                      the whole matrix, on one rank
    W <- (1 - lr weight_decay) W - lr' O      by rows, on their owners

torch computes Newton-Schulz in bf16, so publishing U in bf16 changes no bit of O.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# torch's own arithmetic. These names are in every torch that pyproject.toml allows; torch has no public ones.
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from ..engine.parameter import ShardedParameter, parameter_of_shard
from .buffers import MuonBuffers


class Muon(torch.optim.Muon):
    """`torch.optim.Muon` for the matrices of a model that `fully_shard` sharded: the same arguments, groups and states,
    as in torch 2.13.

        matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name]
        optimizer = Muon(matrices, lr=1e-3, adjust_lr_fn="match_rms_adamw")

    Each matrix has one rank that orthogonalises it, assigned by cost. It reads the update's rows [n, M] from their
    owners and writes the result's rows back; no collective. All ranks call `step`. The first one allocates 2 bytes per
    element of the matrices, divided by the ranks that share memory. Other parameters go to another optimizer:
    `ChainedOptimizer` makes one of both.

    params, lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as of
        `torch.optim.Muon`.

    Raises TypeError for a parameter that is not sharded, ValueError for one that is not 2-D and, in `step`, for
    parameters of two models; RanksDiffer if ranks step other gradients or with other hyperparameters; RankLost if a
    peer's process is gone; DeadlineExceeded if a live one is later than the `timeout` of `fully_shard`.
    """

    _buffers: MuonBuffers | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # until it is found to be right
        for p in group["params"]:
            matrix = parameter_of_shard(p)
            if p.ndim != 2:
                name = "a parameter" if matrix is None else matrix.name
                raise ValueError(
                    f"Muon only supports 2D parameters, and {name} has the size {list(p.shape)}: give it to another "
                    f"optimizer, such as AdamW"
                )
            if matrix is None:
                raise TypeError(
                    f"a parameter of size {list(p.shape)} was not sharded by odc_triton.fully_shard: make Muon after "
                    f"fully_shard, from model.parameters(), or give this one to torch.optim.Muon"
                )
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, on all ranks. A closure can't hold a minibatch: call it before, and give none."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices = self._matrices()
        if not matrices:
            return loss
        passes = matrices[0].passes
        assert passes is not None, f"{matrices[0].name} trains, and has no engine"
        engine = passes.protocol
        try:
            if self._buffers is None or self._buffers.matrices != matrices:  # the first step, or a group was added
                self._buffers = MuonBuffers(engine, matrices)
            self._step_all(self._buffers)
        except BaseException as error:
            engine.abort(error)  # others may be waiting for this rank's part
            raise
        return loss

    def _step_all(self, buffers: MuonBuffers) -> None:
        numbers = {id(matrix.sharded): number for number, matrix in enumerate(buffers.matrices)}
        stepped: dict[int, tuple[DTensor, dict[str, Any]]] = {}
        for group in self.param_groups:
            of_group: tuple[list, list, list] = [], [], []
            self._init_group(group, *of_group)
            for p, gradient, momentum in zip(*of_group, strict=True):
                gradient, momentum, number = gradient.to_local(), momentum.to_local(), numbers[id(p)]
                momentum.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                buffers.rows[number].copy_(update)
                stepped[number] = p, group

        def orthogonal(number: int, matrix: torch.Tensor) -> torch.Tensor:
            _, group = stepped[number]
            return _zeropower_via_newtonschulz(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

        buffers.orthogonalise(stepped.keys(), orthogonal, digest=self._digest(list(stepped)))
        for number, (p, group) in stepped.items():
            lr: Any = group["lr"].squeeze() if isinstance(group["lr"], torch.Tensor) else group["lr"]
            own = p.to_local().mul_(1 - lr * group["weight_decay"])
            own.add_(buffers.rows[number], alpha=-_adjust_lr(lr, group["adjust_lr_fn"], p.shape))

    def _matrices(self) -> list[ShardedParameter]:
        """The parameters that train, in the groups' order."""
        held = [parameter_of_shard(p) for group in self.param_groups for p in group["params"]]
        found = [matrix for matrix in held if matrix is not None and matrix.trains]
        for matrix in found:
            if matrix.passes is not found[0].passes:
                raise ValueError(
                    f"{found[0].name} and {matrix.name} belong to two sharded models: make one Muon for each"
                )
        return found

    def _digest(self, numbers: list[int]) -> int:
        """Of what is stepped, and how. Without tensors, which may be on a device."""
        options = [[group.get(name) for name in self.defaults] for group in self.param_groups]
        options = [[value for value in group if not isinstance(value, torch.Tensor)] for group in options]
        return zlib.crc32(repr((numbers, options)).encode())
