"""A model under `use_odc` does what the same model does under torch's FSDP2 alone: gradients and which are None,
weights and the optimizer's state, by name and bit by bit. One microbatch a rank, so that all sums have two terms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from odc_triton import minibatch, use_odc
from tests.support import ranks
from tests.support.gradients import gradients_of


class _Part(nn.Module):
    """`spare` is used only if the number of rows is even."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.spare = nn.Parameter(torch.ones(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x)) + x
        return x if len(x) % 2 else x + self.spare.sum(0)


class _Parts(nn.Module):
    """Runs the given parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(_Part() for _ in range(3))
        self.activation = nn.Tanh()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, run: Sequence[int]) -> torch.Tensor:
        for place in run:
            x = self.parts[place](x)
        return self.second(self.activation(self.first(x)))


def _shard(model: nn.Module, **options: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    for part in model.parts:
        fully_shard(part, **options)
    fully_shard(model, **options)


def _shard_in_groups(model: nn.Module) -> None:
    """Modules together, a unit without parameters, and options that say what is so by default."""
    from torch.distributed.fsdp import OffloadPolicy, fully_shard

    options = {"shard_placement_fn": lambda parameter: Shard(0), "offload_policy": OffloadPolicy()}
    fully_shard(model.parts[0], **options | {"offload_policy": None})  # as frameworks pass it
    fully_shard(model.activation, **options)
    fully_shard([model.parts[1], model.parts[2]], **options)
    fully_shard([model.first, model.second], **options)
    fully_shard(model, **options)


def _shard_two_dtypes(model: nn.Module) -> None:
    """Units of two dtypes are gathered as bytes."""
    for part in model.parts:
        part.spare = nn.Parameter(part.spare.detach().to(torch.bfloat16), requires_grad=False)
    _shard(model)


def _nothing(model: nn.Module, log: list) -> None:
    pass


def _reduce_unused(model: nn.Module, log: list) -> None:
    if hasattr(model, "set_reduce_scatter_unused_params"):  # of newer versions of torch
        model.set_reduce_scatter_unused_params(True)


def _tie(model: nn.Module, log: list) -> None:
    """Within a unit and across units."""
    model.second.weight = model.first.weight
    model.parts[1].linear.weight = model.parts[0].linear.weight


def _assign(model: nn.Module, log: list) -> None:
    torch.manual_seed(7)
    for module in (model.first, model.parts[1].linear):
        old = module.weight
        module.weight = nn.Parameter(distribute_tensor(torch.randn(6, 6), old.device_mesh, old.placements))


def _load_assigning(model: nn.Module, log: list) -> None:
    """After an evaluation, before the optimizer is made."""
    _evaluate(model, log)
    state = {name: (value * 0.5).detach() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def _hook(model: nn.Module, log: list) -> None:
    """One hook looks, one changes the gradient, one has been removed."""
    weight = model.parts[1].linear.weight
    weight.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.to_local().clone()))
    weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.25))
    weight.register_post_accumulate_grad_hook(lambda p: log.append("removed")).remove()
    weight.register_hook(lambda gradient: log.append("FSDP2 accumulates no gradient here"))


def _write_whole(model: nn.Module, log: list) -> None:
    """What a module writes into its whole weight lasts until that is gathered again, also in the backward."""

    @torch.no_grad()
    def halve(module: nn.Module, args: Any) -> None:
        module.weight.mul_(0.5)

    model.parts[2].linear.register_forward_pre_hook(halve)
    model.second.register_forward_pre_hook(halve)


def _convert(model: nn.Module, log: list) -> None:
    """FSDP2 gathers two of the weights in bf16, though modules see fp32: a tensor's extension."""

    def before(rows: torch.Tensor, mesh: Any) -> tuple[tuple[torch.Tensor], None]:
        return (rows.to(torch.bfloat16),), None

    def after(gathered: tuple, _: None, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        if out is None:
            return (whole := gathered[0].to(dtype)), (gathered[0], whole)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(gathered[0])
        return None

    for weight in (model.parts[0].linear.weight, model.second.weight):
        rows = weight._local_tensor
        rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = partial(before, rows), after


def _evaluate(model: nn.Module, log: list) -> None:
    with torch.no_grad():
        log.append(model(torch.ones(2, 6), (0, 1, 2)))
    model.reshard()


def _step_in_the_hook(model: nn.Module, log: list) -> None:
    def step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(partial(step, torch.optim.SGD([parameter], lr=0.1)))


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, kw_only=True)
class Case:
    """`runs`: of each step, which parts run on each rank. `before` and `after` use_odc."""

    runs: tuple[tuple[int, ...], ...] = ((0, 1, 2), (0, 2), (1,))
    shard: Callable = _shard
    before: Callable = _nothing
    after: Callable = _nothing
    zeroing: dict[str, bool] = field(default_factory=dict)


CASES = {
    "units and parameters that are not used": Case(),
    "which FSDP2 is to reduce": Case(before=_reduce_unused),
    "zeros are kept": Case(zeroing={"set_to_none": False}),
    "units of several modules, and of none": Case(shard=_shard_in_groups),
    "whole for the minibatch": Case(shard=partial(_shard, reshard_after_forward=False)),
    "bf16": Case(shard=partial(_shard, mp_policy=BF16)),
    "two dtypes": Case(shard=_shard_two_dtypes),
    "tied before": Case(before=_tie),
    "tied after": Case(after=_tie),
    "assigned after": Case(after=_assign),
    "loaded by assignment": Case(after=_load_assigning),
    "hooks before": Case(before=_hook),
    "hooks after": Case(after=_hook),
    "written while whole": Case(before=_write_whole),
    "gathered in another dtype": Case(before=_convert, after=_evaluate),
    "an optimizer in the hooks": Case(after=_step_in_the_hook),
}
ROWS = (3, 4, 2)  # of each step's microbatch


def _own(value: torch.Tensor | None) -> torch.Tensor | None:
    """This rank's rows."""
    return value.detach().to_local().clone() if hasattr(value, "to_local") else value


def _trained(rank: int, case: Case, bridge: bool) -> dict[str, Any]:
    """What training leaves on this rank, by name."""
    torch.manual_seed(0)
    model, log, left = _Parts(), [], {}
    case.shard(model)
    case.before(model, log)
    if bridge:
        use_odc(model)
    case.after(model, log)
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step, (run, rows) in enumerate(zip(case.runs, ROWS, strict=True)):
        x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(2 * step + rank))
        with minibatch(model) if bridge else contextlib.nullcontext():
            model(x, run).square().sum().backward()
        for parameter, name in names.items():
            left[f"gradient of {name} in step {step}"] = _own(parameter.grad)
        optimizer.step()
        optimizer.zero_grad(**case.zeroing)
    model.reshard()
    for parameter, name in names.items():
        left[name] = _own(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            left[f"{key} of {name}"] = _own(value)
    return left | {f"call {number}": seen for number, seen in enumerate(log)}


def _microbatches(rank: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Each rank uses a part that the other one doesn't; neither uses the last."""
    return [(torch.full((3 + rank, 6), 0.1 + rank + place), (rank,)) for place in range(1 + rank)]


def _different_parts(rank: int) -> dict[str, torch.Tensor | None]:
    """Whole gradients, which FSDP2 alone could not sum."""
    torch.manual_seed(0)
    model = _Parts()
    _shard(model)
    with minibatch(use_odc(model), tokens=1):
        for x, run in _microbatches(rank):
            model(x, run).square().sum().backward()
    return gradients_of(model)


def _all(rank: int, world: int) -> tuple[dict[str, tuple[dict, dict]], dict]:
    cases = {name: tuple(_trained(rank, case, bridge) for bridge in (False, True)) for name, case in CASES.items()}
    return cases, _different_parts(rank)


def test_as_fsdp2() -> None:
    ran = ranks.run(_all, 2)
    torch.manual_seed(0)
    plain = _Parts()
    for x, run in (*_microbatches(0), *_microbatches(1)):
        plain(x, run).square().sum().backward()
    assert plain.parts[2].linear.weight.grad is None is plain.parts[0].spare.grad
    for cases, gradients in ran:
        for name, (wanted, got) in cases.items():
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")
        # Ranks may use different units. 1e-6: sums of three terms in another order.
        torch.testing.assert_close(gradients, gradients_of(plain), rtol=1e-6, atol=1e-6)
    # What it is compared with: FSDP2 leaves None where nothing was used, and calls the hooks.
    wanted = ran[0][0]["units and parameters that are not used"][0]
    unused = {key for key, value in wanted.items() if value is None}
    assert "gradient of parts.1.linear.weight in step 1" in unused
    assert "gradient of parts.0.spare in step 0" in unused
    assert "gradient of parts.0.spare in step 1" not in unused
    hooked = ran[0][0]["hooks after"][0]
    assert len([key for key in hooked if key.startswith("call")]) == 2
