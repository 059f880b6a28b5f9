"""What can't work is refused, with the value and the remedy, and on every rank."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import nn

from . import ranks


def caught(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def net(width: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def compare(messages: dict[str, str], expected: dict[str, str]) -> None:
    assert messages.keys() == expected.keys()
    for name, pattern in expected.items():
        assert re.search(pattern, messages[name]), f"{name}: {messages[name]}"


# ---------------------------------------------------------------------- what is given to fully_shard


def _options(rank: int, world: int) -> dict[str, str]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.distributed.tensor import Replicate, distribute_tensor

    from odc_triton import MixedPrecisionPolicy, fully_shard

    def quantised(dtype: torch.dtype) -> nn.Module:
        model = net()
        model[0].weight = nn.Parameter(torch.zeros(6, 4, dtype=dtype), requires_grad=False)
        return model

    def tensor_parallel() -> nn.Module:
        model = net()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh, [Replicate()]))
        return model

    def hooked() -> nn.Module:
        model = net()
        model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
        return model

    def optimizer_in_backward() -> nn.Module:
        model = net()
        _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
        return model

    def mesh_of(*names: str) -> object:
        return init_device_mesh("cpu", (world, 1)[: len(names)], mesh_dim_names=names)

    def twice() -> None:
        model = fully_shard(net())
        fully_shard(model)

    def below_a_root() -> None:
        model = fully_shard(net())
        fully_shard(model[0])

    def in_two_models() -> None:
        shared = nn.Linear(4, 4)
        fully_shard(nn.Sequential(shared, nn.Linear(4, 4)))
        fully_shard(nn.Sequential(shared, nn.Linear(4, 4)))

    def in_two_models_as_a_unit() -> None:
        first = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
        first.forward = lambda x: x
        shared = first["blocks"][0]
        fully_shard(nn.Sequential(first))
        fully_shard(nn.Sequential(shared, nn.Linear(4, 4)))

    def deterministic() -> None:
        torch.use_deterministic_algorithms(True)
        try:
            fully_shard(net())
        finally:
            torch.use_deterministic_algorithms(False)

    cases: dict[str, Callable[[], object]] = {
        "list": lambda: fully_shard([net(), net()]),
        "not a module": lambda: fully_shard("model"),
        "ModuleList": lambda: fully_shard(nn.ModuleList([net()])),
        "no parameters": lambda: fully_shard(nn.ReLU()),
        "twice": twice,
        "below a root": below_a_root,
        "in two models": in_two_models,
        "in two models, a unit": in_two_models_as_a_unit,
        "uint8": lambda: fully_shard(quantised(torch.uint8)),
        "int8": lambda: fully_shard(quantised(torch.int8)),
        "float8": lambda: fully_shard(quantised(torch.float8_e4m3fn)),
        "DTensor": lambda: fully_shard(tensor_parallel()),
        "lazy": lambda: fully_shard(nn.Sequential(nn.LazyLinear(3))),
        "hook": lambda: fully_shard(hooked()),
        "optimizer in backward": lambda: fully_shard(optimizer_in_backward()),
        "2-D mesh": lambda: fully_shard(net(), mesh=mesh_of("dp", "tp")),
        "3-D mesh": lambda: fully_shard(net(), mesh=init_device_mesh("cpu", (world, 1, 1))),
        "turned mesh": lambda: fully_shard(net(), mesh=mesh_of("shard", "replicate")),
        "tp": lambda: fully_shard(net(), mesh=mesh_of("tp")),
        "cp": lambda: fully_shard(net(), mesh=mesh_of("cp")),
        "pp": lambda: fully_shard(net(), mesh=mesh_of("pp")),
        "mesh": lambda: fully_shard(net(), mesh=dist.group.WORLD),
        "shard_placement_fn": lambda: fully_shard(net(), shard_placement_fn=lambda p: None),
        "offload_policy": lambda: fully_shard(net(), offload_policy=CPUOffloadPolicy()),
        "dp_mesh_dims": lambda: fully_shard(net(), dp_mesh_dims=("dp",)),
        "mp_policy": lambda: fully_shard(net(), mp_policy=torch.bfloat16),
        "param_dtype": lambda: fully_shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.int8)),
        "reshard_after_forward": lambda: fully_shard(net(), reshard_after_forward="yes"),
        "backend": lambda: fully_shard(net(), backend="nvshmem"),
        "timeout": lambda: fully_shard(net(), timeout=30),
        "zero timeout": lambda: fully_shard(net(), timeout=timedelta()),
        "deterministic": deterministic,
    }
    return {name: caught(action) for name, action in cases.items()}


def test_options() -> None:
    expected = {
        "list": "NotImplementedError.*one module",
        "not a module": "TypeError.*str",
        "ModuleList": "ValueError: ModuleList has no forward.*parent",
        "no parameters": "ValueError: ReLU has no parameters",
        "twice": "ValueError.*sharded already",
        "below a root": "ValueError: weight is a DTensor.*plain model",
        "in two models": "ValueError: 0.weight is a DTensor",
        "in two models, a unit": "ValueError: 0 belongs to another sharded model.*one engine only",
        "uint8": r"ValueError: 0\.weight is Parameter of torch\.uint8.*ignored_params",
        "int8": r"ValueError: 0\.weight is Parameter of torch\.int8.*ignored_params",
        "float8": r"ValueError: 0\.weight is Parameter of torch\.float8.*ignored_params",
        "DTensor": "ValueError: 0.weight is a DTensor.*plain model",
        "lazy": "ValueError.*lazy parameter.*run one forward",
        "hook": "ValueError: 0.weight has gradient hooks.*after the minibatch",
        "optimizer in backward": "ValueError: 0.weight has gradient hooks.*after the minibatch",
        "3-D mesh": r"NotImplementedError.*3 dimensions without names.*\('replicate', 'shard'\)",
        "turned mesh": r"NotImplementedError.*2 dimensions \('shard', 'replicate'\).*turn the mesh round",
        "2-D mesh": r"NotImplementedError.*2 dimensions.*mesh\['dp'\]",
        "tp": "NotImplementedError.*'tp'",
        "cp": "NotImplementedError.*'cp'",
        "pp": "NotImplementedError.*'pp'",
        "mesh": "TypeError.*give a DeviceMesh",
        "shard_placement_fn": "NotImplementedError: shard_placement_fn is not supported, leave it out",
        "offload_policy": "NotImplementedError: offload_policy is not supported, leave it out",
        "dp_mesh_dims": "NotImplementedError: dp_mesh_dims is not supported, leave it out",
        "mp_policy": "TypeError.*give a MixedPrecisionPolicy",
        "param_dtype": r"ValueError.*param_dtype=torch\.int8.*bfloat16",
        "reshard_after_forward": "TypeError.*'yes'",
        "backend": "ValueError.*'nvshmem'.*'cpu'",
        "timeout": "ValueError.*30.*timedelta",
        "zero timeout": "ValueError.*positive timedelta",
        "deterministic": "RuntimeError.*use_deterministic_algorithms.*order of their arrival",
    }
    (messages,) = ranks.run(_options, 1)
    compare(messages, expected)


# ---------------------------------------------------------------------- what differs between ranks


def _different(rank: int, world: int) -> dict[str, str]:
    from odc_triton import MixedPrecisionPolicy, begin_minibatch, end_minibatch, fully_shard, minibatch

    other = rank == 1

    def frozen() -> nn.Module:
        model = net()
        if other:
            model[2].bias.requires_grad_(False)
        return model

    def renamed() -> nn.Module:
        layers = {"first": nn.Linear(4, 4), "last" if other else "second": nn.Linear(4, 4)}
        model = nn.Module()
        for name, layer in layers.items():
            model.add_module(name, layer)
        return model

    def quantised() -> nn.Module:
        model = net()
        if other:
            model[0].weight = nn.Parameter(torch.zeros(6, 4, dtype=torch.int8), requires_grad=False)
        return model

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if other else None)
    one = fully_shard(net())

    def give_tokens_on_one_rank() -> None:
        begin_minibatch(one, 7 if other else None)

    def bad_tokens(tokens: object) -> Callable[[], None]:
        return lambda: begin_minibatch(one, tokens if other else 1)

    def still_works() -> None:
        with minibatch(one, tokens=rank) as mb:
            raise ValueError(f"tokens {mb.tokens}")

    def different_calls() -> None:
        model = fully_shard(net())
        with minibatch(model):
            pass
        if other:
            fully_shard(model[0])  # refused here; the point is the next line
        begin_minibatch(model)

    def different_order() -> None:
        model = fully_shard(net())
        begin_minibatch(model)
        if other:
            model._odc_engine.meetings.meet("something else", {})
        end_minibatch(model)

    def different_betas() -> None:
        model = fully_shard(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.8, 0.9 if other else 0.99))
        for _ in range(2):
            with minibatch(model):
                model(torch.ones(2, 4)).sum().backward()
            optimizer.step()

    return {
        "betas": caught(different_betas),
        "shape": caught(lambda: fully_shard(net(7 if other else 6))),
        "number": caught(lambda: fully_shard(nn.Sequential(net(), nn.Linear(2, 2)) if other else nn.Sequential(net()))),
        "name": caught(lambda: fully_shard(renamed())),
        "dtype": caught(lambda: fully_shard(net().double() if other else net())),
        "requires_grad": caught(lambda: fully_shard(frozen())),
        "policy": caught(lambda: fully_shard(net(), mp_policy=policy)),
        "timeout": caught(lambda: fully_shard(net(), timeout=timedelta(minutes=1 + rank))),
        "refused on one": caught(lambda: fully_shard(quantised())),
        "tokens on one": caught(give_tokens_on_one_rank),
        "negative tokens": caught(bad_tokens(-1)),
        "float tokens": caught(bad_tokens(2.0)),
        "goes on": caught(still_works),
        "different order": caught(different_order),
    }


def test_ranks_differ() -> None:
    results = ranks.run(_different, 3)
    expected = {
        "betas": r"RanksDiffer: .* betas \(parameter group 0\) is 0.8, 0.99 on ranks \[0, 2\]; 0.8, 0.9 on ranks \[1\]",
        "shape": r"RanksDiffer.*0\.weight.*\[[67], 4\].*against.*0\.weight.*\[[67], 4\]",
        "number": r"RanksDiffer.*1\.weight.*stands only (here|there)",
        "name": r"RanksDiffer.*(second|last)\.weight.*against.*(second|last)\.weight",
        "dtype": "RanksDiffer.*float(32|64).*against.*float(32|64)",
        "requires_grad": r"RanksDiffer.*2\.bias.*reduce_dtype.*against.*2\.bias",
        "policy": "RanksDiffer.*option policy.*bfloat16|RanksDiffer.*option policy.*None.*against.*bfloat16",
        "timeout": "RanksDiffer.*option timeout = 0:0[123]:00.*against.*option timeout",
        "refused on one": r"RanksDiffer.*rank 1 could not shard its model: ValueError: 0\.weight.*int8",
        "tokens on one": r"RanksDiffer: tokens was given on some ranks but not on ranks \[0, 2\]",
        "negative tokens": "MinibatchFailed.*rank 1: ValueError: tokens is -1; give",
        "float tokens": r"MinibatchFailed.*rank 1: ValueError: tokens is 2\.0; give",
        "goes on": "MinibatchFailed.*rank 0: ValueError: tokens 3.*rank 1: .*rank 2: ",
        "different order": "RanksDiffer.*'(something else|leave minibatch 0)' while rank [01]",
    }
    for rank, messages in enumerate(results):
        at = expected | ({"refused on one": r"^ValueError: 0\.weight is Parameter of torch\.int8"} if rank == 1 else {})
        compare(messages, at)


# ---------------------------------------------------------------------- what is done around the minibatch


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
        "deterministic": "MinibatchFailed.*use_deterministic_algorithms.*Switch it off",
        "thawed": "MinibatchFailed.*0.weight was frozen.*before that",
        "data replaced": "MinibatchFailed.*0.weight no longer lies in the shared heap.*copy_",
        "local data replaced": "MinibatchFailed.*0.weight no longer lies in the shared heap.*copy_",
        "parameter replaced": "MinibatchFailed.*0.weight was replaced by another parameter.*copy_",
        "submodule.double": "MinibatchFailed.*0.weight no longer lies in the shared heap.*copy_",
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


# ---------------------------------------------------------------------- silent mistakes


def _silent(rank: int, world: int) -> dict[str, str]:
    import numpy as np

    from odc_triton import fully_shard, minibatch

    original = net()
    early = torch.optim.SGD(original.parameters(), lr=0.1)
    model = fully_shard(original, timeout=timedelta(seconds=20))
    messages = {"optimizer made before": caught(early.step)}
    messages["names ignored"] = caught(lambda: fully_shard(net(), ignored_params=["0.weight"]))

    def enter(tokens: object) -> str:
        with minibatch(model, tokens=tokens) as mb:
            return f"tokens {mb.tokens}"

    messages["tokens of a tensor"] = enter(torch.tensor(3))
    messages["tokens of numpy"] = enter(np.int64(4))
    messages["tokens of a word"] = caught(lambda: enter("five" if rank == 0 else 5))
    messages["and then"] = enter(5)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages["closure"] = caught(lambda: optimizer.step(lambda: enter(1)))
    return messages


def test_silent_mistakes_are_refused() -> None:
    for messages in ranks.run(_silent, 2):
        compare(
            messages,
            {
                "optimizer made before": r"RuntimeError: .* as it was before fully_shard",
                "names ignored": r"TypeError: ignored_params holds '0.weight'",
                "tokens of a tensor": "^tokens 6$",
                "tokens of numpy": "^tokens 8$",
                "tokens of a word": r"MinibatchFailed: .*rank 0: ValueError: tokens is 'five'",
                "and then": "^tokens 10$",
                "closure": r"MinibatchFailed: .*an optimizer step has begun and not ended",
            },
        )


def test_errors_can_be_pickled() -> None:
    import pickle

    from odc_triton import DeadlineExceeded, MinibatchFailed, RankLost

    for error in (RankLost([1], "x"), DeadlineExceeded([0, 2], "y"), MinibatchFailed(3, {1: "ValueError: z"})):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.ranks == error.ranks


# ---------------------------------------------------------------------- what is told of errors


def test_tokens_that_nobody_gave() -> None:
    from odc_triton import fully_shard, minibatch

    model = fully_shard(net(), backend="cpu")
    with minibatch(model) as mb, pytest.raises(RuntimeError, match=r"give this rank's .* minibatch\(model, tokens=…\)"):
        _ = mb.tokens
    with minibatch(model, tokens=3) as mb:
        assert mb.tokens == 3


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("short"), "ValueError: short"),
        (_Unspeakable(), r"_Unspeakable: \(its text can't be made: ValueError\)"),
        (ValueError("a" * 30_000_000 + "z"), r"ValueError: a{2000} … \(29,996,001 characters left out\) … a{1999}z"),
    ],
    ids=["short", "unspeakable", "30 MB"],
)
def test_an_error_is_told_in_few_words(error: Exception, said: str) -> None:
    from odc_triton.errors import describe

    assert re.fullmatch(said, describe(error))


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from odc_triton import __version__
    from odc_triton.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"odc-triton {__version__}\n"


# ---------------------------------------------------------------------- what came after fully_shard


def test_parameters_added_after_fully_shard() -> None:
    from odc_triton import MinibatchFailed, fully_shard, minibatch

    kept = nn.Parameter(torch.zeros(3))
    model = net()
    model.register_parameter("kept", kept)
    model = fully_shard(model, backend="cpu", ignored_params={kept})
    with minibatch(model):
        pass
    model[0].register_parameter("late", nn.Parameter(torch.zeros(2)))
    with pytest.raises(MinibatchFailed, match=r"0\.late was added after fully_shard.*first get_peft_model"):
        minibatch(model).__enter__()
    model[0].late.requires_grad_(False)
    with minibatch(model):
        pass


def _in_a_child(rank: int, world: int) -> tuple[dict[str, str], bool]:
    """What a forked process is told, and whether the parent's weights are as they were."""
    import json
    import os

    from odc_triton import full_parameters, fully_shard, minibatch, publish

    model, x = fully_shard(net()), torch.ones(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in full_parameters(model)}
    reader, writer = os.pipe()
    with minibatch(model):
        output = model(x).sum()
        if (child := os.fork()) == 0:
            said = {
                "forward": caught(lambda: model(x)),
                "backward": caught(output.backward),
                "end": caught(lambda: model._odc_engine.end()),
                "minibatch": caught(lambda: minibatch(model).__enter__()),
                "step": caught(optimizer.step),
                "publish": caught(lambda: publish(model)),
            }
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = json.loads(os.read(reader, 65536))
    return said, all(torch.equal(value, before[name]) for name, value in full_parameters(model))


def test_a_forked_process_trains_nothing() -> None:
    for rank, (said, unchanged) in enumerate(ranks.run(_in_a_child, 2)):
        assert unchanged
        assert said.pop("forward") == "nothing was raised"
        for what, text in said.items():
            assert re.search(rf"RuntimeError: .* in process \d+, forked from rank {rank} ", text), f"{what}: {text}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["train", "sft", "--data", "x", "--out", "y", "--token-capp", "8"],
            "--token-capp 8; did you mean --token-cap?",
        ),
        (["train", "sft", "--data", "x", "--out", "y", "--seeed=8"], "--seeed=8; did you mean --seed?"),
        (["doctor", "--qqqqqqq"], "--qqqqqqq\n"),
    ],
)
def test_a_mistyped_option(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from odc_triton.cli import main

    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert f"unrecognized arguments: {said}" in capsys.readouterr().err
