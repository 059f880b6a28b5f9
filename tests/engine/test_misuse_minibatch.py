"""What is done around the minibatch: refused on every rank where it can't work, and harmless where it may be done."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import optimizer as hooks

from odc_triton import begin_minibatch, end_minibatch, full_parameters, fully_shard, minibatch, publish, use_odc
from tests.support import ranks
from tests.support.gradients import gradients_of
from tests.support.refusals import caught, net


def _calls(rank: int, world: int) -> None:
    x = torch.ones(3, 4)

    def fresh(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(net(), **options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def inside(action: Callable[[nn.Module, torch.optim.Optimizer], object]) -> Callable[[], None]:
        """`action` in a minibatch of a new model."""

        def act() -> None:
            model, optimizer = fresh()
            with minibatch(model):
                action(model, optimizer)

        return act

    def begun_after(change: Callable[[nn.Module], object]) -> Callable[[], None]:
        """A minibatch begins after `change` of a new model."""

        def begin() -> None:
            model, _ = fresh()
            change(model)
            begin_minibatch(model)

        return begin

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).sum().backward()
        optimizer.step()

    def step_of_a_part(model: nn.Module, _: torch.optim.Optimizer) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        optimizer.step()  # nothing of ours: fine
        optimizer.add_param_group({"params": list(model[2].parameters())})
        optimizer.step()

    def backward_after(*, in_the_next: bool) -> Callable[[], None]:
        def act() -> None:
            model, optimizer = fresh()
            with minibatch(model):
                loss = model(x).sum()
            if not in_the_next:
                loss.backward()
            optimizer.step()
            with minibatch(model):
                loss.backward()

        return act

    def inside_a_forward() -> None:
        model, _ = fresh()
        model[1].register_forward_pre_hook(lambda *_: begin_minibatch(model))
        model(x)

    def thawed() -> None:
        model = net()
        model[0].requires_grad_(False)
        fully_shard(model)
        model[0].weight.requires_grad_(True)
        begin_minibatch(model)

    def replace_data(model: nn.Module) -> None:
        model[0].weight.data = model[0].weight.data.clone()

    def replace_parameter(model: nn.Module) -> None:
        model[0].weight = nn.Parameter(torch.zeros(6, 4))

    def functional_call() -> None:
        model, _ = fresh()
        torch.func.functional_call(model, {"0.weight": torch.zeros(6, 4)}, (x,))

    def edited(in_place: Callable[[nn.Module], object], *, then_forward: bool) -> Callable[[], None]:
        def edit() -> None:
            model, _ = fresh()
            with minibatch(model):
                model(x).sum().backward()
                with torch.no_grad():
                    in_place(model)
                if then_forward:
                    model(x)
                    pytest.fail("a forward read what was edited")

        return edit

    def edited_in_a_forward() -> None:
        model, _ = fresh()
        model[1].register_forward_pre_hook(lambda *_: model[0].weight.detach().mul_(2) is None or None)
        with minibatch(model):
            model(x).sum().backward()

    def one_units_factor() -> None:
        model = net()
        fully_shard(model[0]).set_gradient_divide_factor(2.0)
        begin_minibatch(fully_shard(model))

    model, _ = fresh()
    cases = [
        (inside(step), "MinibatchFailed.*optimizer step inside a minibatch.*Step after"),
        (inside(step_of_a_part), "MinibatchFailed.*optimizer step inside a minibatch.*Step after"),
        (lambda: model(x).sum().backward(), "RuntimeError: backward outside of a minibatch: put it into"),
        (backward_after(in_the_next=False), "RuntimeError: backward outside of a minibatch"),
        (backward_after(in_the_next=True), "MinibatchFailed.*forward outside of minibatch 1.*in one minibatch"),
        (
            inside(lambda model, _: minibatch(model).__enter__()),
            "MinibatchFailed.*minibatch 0 is still open.*don't nest",
        ),
        (lambda: end_minibatch(model), "RuntimeError: no minibatch is open.*begin_minibatch"),
        (inside(lambda model, _: publish(model)), "MinibatchFailed.*can't be published inside a minibatch"),
        (inside_a_forward, "MinibatchFailed.*inside a forward"),
        (
            begun_after(lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda _: None)),
            "MinibatchFailed.*0.weight has gradient hooks.*after the minibatch",
        ),
        (thawed, "MinibatchFailed.*0.weight was frozen.*before that"),
        (begun_after(replace_data), "MinibatchFailed.*0.weight is no longer in the shared heap.*copy_"),
        (begun_after(replace_parameter), "MinibatchFailed.*0.weight was replaced by another tensor.*copy_"),
        (functional_call, "^RuntimeError: 0.weight was replaced by another tensor.*functional_call.*copy_"),
        (
            edited(lambda model: model[0].weight.mul_(2), then_forward=True),
            "MinibatchFailed.*0.weight was edited in place inside a minibatch.*publish",
        ),
        (
            edited(lambda model: model[2].bias.zero_(), then_forward=False),
            "MinibatchFailed.*2.bias was edited in place inside a minibatch",
        ),
        (edited_in_a_forward, "MinibatchFailed.*0.weight was edited in place inside a minibatch"),
        (lambda: copy.deepcopy(nn.Sequential(model)), "TypeError: a sharded model can't be copied.*full_parameters"),
        (lambda: torch.save(model, io.BytesIO()), "TypeError: a sharded model can't be pickled.*state_dict"),
        (lambda: model.set_gradient_divide_factor(0), "ValueError: factor is 0"),
        (lambda: model.set_gradient_divide_factor(math.inf), "ValueError: factor is inf"),
        (lambda: use_odc(net(), divide_factor=math.inf), "ValueError: divide_factor is inf"),
        (
            one_units_factor,
            "MinibatchFailed.*units have different gradient divide factors, 2.0, None: call .* on the root",
        ),
        (lambda: begin_minibatch(net()), "TypeError: Sequential is not sharded: call fully_shard"),
    ]
    for action, words in cases:
        assert re.search(words, said := caught(action)), said


def test_calls() -> None:
    ranks.run(_calls, 1)


def _warned(rank: int, world: int) -> tuple[list[str], list[str]]:
    x = torch.ones(3, 4)
    model = fully_shard(net())

    def run(steps: int, microbatches: int) -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(steps):
                with minibatch(model):
                    for _ in range(microbatches):
                        model(x).sum().backward()
        return [str(entry.message) for entry in seen]

    return run(3, 1), run(2, 1 + rank)


def test_warned_once() -> None:
    for dropped, counts in ranks.run(_warned, 2):
        assert len(dropped) == 1
        assert re.search("gradients of minibatch 0 are dropped.*one minibatch", dropped[0])
        assert len(counts) == 1
        assert re.search(r"ranks ran \[1, 2\] microbatches.*give tokens=", counts[0])


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.sometimes = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.used(x) + self.sometimes(x) if both else self.used(x)


def _sometimes_unused(rank: int, world: int) -> dict[str, dict[str, torch.Tensor | None]]:
    """Values and gradients after the last step, by how gradients are zeroed; with plain torch's on rank 0."""

    def run(sharded: bool, zero: str, inside: bool) -> dict[str, torch.Tensor | None]:
        model = _TwoHeads()
        if sharded:
            fully_shard(model)
        plain, zeroed = nn.Parameter(torch.ones(())), []  # of no sharded model
        optimizer = torch.optim.AdamW([*model.parameters(), plain], lr=0.1, foreach=zero == "foreach")
        clear = {
            "none": model.zero_grad,
            "in place": lambda: model.zero_grad(set_to_none=False),
            "foreach": lambda: [optimizer.zero_grad(set_to_none=False), zeroed.append(plain.grad.item())],
            "never": lambda: None,
        }[zero]
        generator = torch.Generator().manual_seed(5)
        for step in range(3):
            x = torch.randn(4, 4, generator=generator)
            plain.grad = torch.ones(())
            if not inside:
                clear()
            with minibatch(model) if sharded else contextlib.nullcontext():
                if inside:
                    clear()
                rows = x[rank::world] if sharded else x
                model(rows, both=step == 0).square().sum().mul(world if sharded else 1).backward()
            optimizer.step()
        assert not any(zeroed)
        values = dict(full_parameters(model)) if sharded else {n: p.detach() for n, p in model.named_parameters()}
        grads = gradients_of(model)
        return values | {f"{name}.grad": grads.get(name) for name, _ in model.named_parameters()}

    found = {}
    for inside in (False, True):
        for zero in ("none", "in place", "foreach"):
            found[f"{zero}, inside={inside}"] = run(True, zero, inside)
            found[f"{zero}, inside={inside}, torch"] = run(False, zero, inside)
    found["never"] = run(True, "never", False)
    return found


def test_a_zeroed_gradient_stays_zero_where_nothing_is_added() -> None:
    """As in torch: with zeros AdamW's momentum goes on, with None it does not."""
    for found in ranks.run(_sometimes_unused, 2):
        wanted = {name.removesuffix(", torch"): want for name, want in found.items() if name.endswith(", torch")}
        assert len(wanted) == 6
        # fp32, sums of two ranks in another order
        torch.testing.assert_close({name: found[name] for name in wanted}, wanted, rtol=1e-5, atol=1e-6)
        assert found["none, inside=False"]["sometimes.weight.grad"] is None
        assert (found["in place, inside=False"]["sometimes.weight.grad"] == 0).all()
        # The sum of a minibatch replaces what was there before: a gradient that was not zeroed does not stay.
        assert found["never"]["sometimes.weight.grad"] is None


def test_backward_to_what_is_whole() -> None:
    """As in FSDP2, the root stays whole between forward and backward, so its parameters can be named as inputs."""
    plain, model = net(), fully_shard(net(), backend="cpu")
    x = torch.ones(3, 4)
    plain(x).sum().backward(inputs=[plain[0].weight, plain[2].bias])
    with minibatch(model):
        loss = model(x).sum()
        loss.backward(inputs=[model[0].weight, model[2].bias])
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=0, atol=0)


def test_an_older_model_is_freed_while_an_optimizer_steps() -> None:
    models: list[nn.Module] = []

    def free(*_: object) -> None:
        del models[:-1]
        gc.collect()

    freeing = hooks.register_optimizer_step_pre_hook(free)  # the garbage collector may run while torch calls its hooks
    ours = len(hooks._global_optimizer_pre_hooks)
    models += [fully_shard(net(), backend="cpu") for _ in range(2)]
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    with minibatch(models[1]):
        models[1](torch.ones(3, 4)).sum().backward()
    optimizer.step()
    freeing.remove()
    assert len(models) == 1
    fully_shard(net(), backend="cpu")
    assert len(hooks._global_optimizer_pre_hooks) <= ours + 2, "hooks of freed models are left"


def test_tokens_that_nobody_gave() -> None:
    model = fully_shard(net(), backend="cpu")
    with minibatch(model) as mb, pytest.raises(RuntimeError, match=r"give this rank's .* minibatch\(model, tokens=…\)"):
        _ = mb.tokens
    with minibatch(model, tokens=3) as mb:
        assert mb.tokens == 3
