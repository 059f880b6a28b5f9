"""What is done around the minibatch: refused on every rank where it can't work, and harmless where it may be done."""

from __future__ import annotations

import copy
import io
import re
import warnings

import pytest
import torch
from torch import nn

from tests.support import ranks
from tests.support.refusals import caught, compare, net


def _calls(rank: int, world: int) -> dict[str, str]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    from odc_triton import begin_minibatch, end_minibatch, fully_shard, minibatch, publish

    x = torch.ones(3, 4)

    def fresh(**options: object) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(net(), **options)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step_inside() -> None:
        model, optimizer = fresh()
        with minibatch(model):
            model(x).sum().backward()
            optimizer.step()

    def step_of_a_part_inside() -> None:
        model, _ = fresh()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        with minibatch(model):
            optimizer.step()  # nothing of ours: fine
            optimizer.add_param_group({"params": list(model[2].parameters())})
            optimizer.step()

    def backward_outside() -> None:
        model, _ = fresh()
        model(x).sum().backward()

    def backward_after() -> None:
        model, _ = fresh()
        with minibatch(model):
            loss = model(x).sum()
        loss.backward()

    def backward_of_an_earlier_one() -> None:
        model, optimizer = fresh()
        with minibatch(model):
            loss = model(x).sum()
        optimizer.step()
        with minibatch(model):
            loss.backward()

    def nested() -> None:
        model, _ = fresh()
        with minibatch(model):
            with minibatch(model):
                pass

    def publish_inside() -> None:
        model, _ = fresh()
        with minibatch(model):
            publish(model)

    def inside_a_forward() -> None:
        model, _ = fresh()
        model[1].register_forward_pre_hook(lambda *_: begin_minibatch(model))
        model(x)

    def hook_later() -> None:
        model, _ = fresh()
        model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
        begin_minibatch(model)

    def optimizer_in_backward_later() -> None:
        model, _ = fresh()
        _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
        begin_minibatch(model)

    def deterministic() -> None:
        model, _ = fresh()
        torch.use_deterministic_algorithms(True)
        try:
            begin_minibatch(model)
        finally:
            torch.use_deterministic_algorithms(False)

    def thawed() -> None:
        model = net()
        model[0].requires_grad_(False)
        fully_shard(model)
        model[0].weight.requires_grad_(True)
        begin_minibatch(model)

    def data_replaced() -> None:
        model, _ = fresh()
        model[0].weight.data = model[0].weight.data.clone()
        begin_minibatch(model)

    def local_data_replaced() -> None:
        model, _ = fresh()
        model[0].weight._local_tensor.data = torch.zeros(6, 4)
        begin_minibatch(model)

    def parameter_replaced() -> None:
        model, _ = fresh()
        model[0].weight = nn.Parameter(torch.zeros(6, 4))
        begin_minibatch(model)

    def submodule_double() -> None:
        model, _ = fresh()
        model[0].double()
        begin_minibatch(model)

    def not_sharded() -> None:
        begin_minibatch(net())

    model, _ = fresh()
    return {
        "step inside": caught(step_inside),
        "step of a part inside": caught(step_of_a_part_inside),
        "backward outside": caught(backward_outside),
        "backward after": caught(backward_after),
        "backward of an earlier one": caught(backward_of_an_earlier_one),
        "nested": caught(nested),
        "end without begin": caught(lambda: end_minibatch(model)),
        "publish inside": caught(publish_inside),
        "inside a forward": caught(inside_a_forward),
        "hook later": caught(hook_later),
        "optimizer in backward later": caught(optimizer_in_backward_later),
        "deterministic": caught(deterministic),
        "thawed": caught(thawed),
        "data replaced": caught(data_replaced),
        "local data replaced": caught(local_data_replaced),
        "parameter replaced": caught(parameter_replaced),
        "submodule.double": caught(submodule_double),
        "double": caught(model.double),
        "to_empty": caught(lambda: model.to_empty(device="meta")),
        "assign": caught(lambda: model.load_state_dict(model.state_dict(), assign=True)),
        "deepcopy": caught(lambda: copy.deepcopy(nn.Sequential(model))),
        "pickle": caught(lambda: torch.save(model, io.BytesIO())),
        "divide factor": caught(lambda: model.set_gradient_divide_factor(0)),
        "not sharded": caught(not_sharded),
    }


def test_calls() -> None:
    expected = {
        "step inside": "MinibatchFailed.*optimizer step inside a minibatch.*Step after",
        "step of a part inside": "MinibatchFailed.*optimizer step inside a minibatch.*Step after",
        "backward outside": "RuntimeError: backward outside of a minibatch: put it into",
        "backward after": "RuntimeError: backward outside of a minibatch",
        "backward of an earlier one": "MinibatchFailed.*forward outside of minibatch 1.*in one minibatch",
        "nested": "MinibatchFailed.*minibatch 0 is still open.*don't nest",
        "end without begin": "RuntimeError: no minibatch is open.*begin_minibatch",
        "publish inside": "MinibatchFailed.*can't be published inside a minibatch",
        "inside a forward": "MinibatchFailed.*inside a forward",
        "hook later": "MinibatchFailed.*0.weight has gradient hooks.*after the minibatch",
        "optimizer in backward later": "MinibatchFailed.*0.weight has gradient hooks.*after the minibatch",
        "deterministic": "MinibatchFailed.*use_deterministic_algorithms.*came after fully_shard.*exact=True",
        "thawed": "MinibatchFailed.*0.weight was frozen.*before that",
        "data replaced": "MinibatchFailed.*0.weight is no longer in the shared heap.*copy_",
        "local data replaced": "MinibatchFailed.*0.weight is no longer in the shared heap.*copy_",
        "parameter replaced": "MinibatchFailed.*0.weight was replaced by another parameter.*copy_",
        "submodule.double": "MinibatchFailed.*0.weight is no longer in the shared heap.*copy_",
        "double": r"RuntimeError.*weight is torch\.float32 on cpu and would become torch\.float64.*before fully_shard",
        "to_empty": "RuntimeError.*meta.*heap",
        "assign": "RuntimeError.*assign=True.*leave assign out",
        "deepcopy": "TypeError: a sharded model can't be copied.*full_parameters",
        "pickle": "TypeError: a sharded model can't be pickled.*state_dict",
        "divide factor": "ValueError: factor is 0",
        "not sharded": "TypeError: Sequential is not sharded: call fully_shard",
    }
    (messages,) = ranks.run(_calls, 1)
    compare(messages, expected)


def _warned(rank: int, world: int) -> tuple[list[str], list[str]]:
    from odc_triton import fully_shard, minibatch

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


# ---------------------------------------------------------------------- what is harmless


def _trained(rank: int, world: int, zero: str) -> dict[str, torch.Tensor]:
    from odc_triton import full_parameters, fully_shard, minibatch

    model = fully_shard(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zeros = {
        "never": lambda: None,
        "optimizer": optimizer.zero_grad,
        "optimizer in place": lambda: optimizer.zero_grad(set_to_none=False),
        "model": model.zero_grad,
        "model in place": lambda: model.zero_grad(set_to_none=False),
    }
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        zeros[zero]()
        with minibatch(model):
            zeros[zero]()
            model(torch.randn(3, 4, generator=generator)).square().sum().backward()
            zeros[zero]()
        optimizer.step()
        zeros[zero]()
    return dict(full_parameters(model))


@pytest.mark.parametrize("zero", ["optimizer", "optimizer in place", "model", "model in place"])
def test_zero_grad_anywhere(zero: str) -> None:
    want = ranks.run(_trained, 2, "never")[0]
    for got in ranks.run(_trained, 2, zero):
        # Two ranks add in either order: a + b == b + a, so the results are the same bits.
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_tokens_that_nobody_gave() -> None:
    from odc_triton import fully_shard, minibatch

    model = fully_shard(net(), backend="cpu")
    with minibatch(model) as mb, pytest.raises(RuntimeError, match=r"give this rank's .* minibatch\(model, tokens=…\)"):
        _ = mb.tokens
    with minibatch(model, tokens=3) as mb:
        assert mb.tokens == 3
