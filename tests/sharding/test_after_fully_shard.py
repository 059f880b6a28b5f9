"""What came after fully_shard: parameters, and processes."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from odc_triton import MinibatchFailed, full_parameters, fully_shard, minibatch, publish
from tests.support import ranks
from tests.support.forks import fork
from tests.support.refusals import caught, net


def test_parameters_added_after_fully_shard() -> None:
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


def test_a_parameter_added_to_one_of_a_list() -> None:
    one, other = fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    one.register_parameter("late", nn.Parameter(torch.zeros(2)))
    with pytest.raises(MinibatchFailed, match="late was added after fully_shard"):
        minibatch(other).__enter__()


def test_ignored_parameters_may_come_from_an_iterator() -> None:
    model = nn.Linear(2, 2)
    fully_shard(model, ignored_params=(each for each in [model.bias]))  # pyright: ignore[reportArgumentType]
    assert [isinstance(each, DTensor) for each in (model.weight, model.bias)] == [True, False]


def _in_a_child() -> tuple[dict[str, str], bool]:
    """What a forked process is told, and whether the parent's weights are as they were."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)  # without a thread
    model, x = fully_shard(net()), torch.ones(1, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: value.clone() for name, value in full_parameters(model)}
    reader, writer = os.pipe()
    with minibatch(model):
        output = model(x).sum()
        if (child := fork()) == 0:
            said = {
                "forward": caught(lambda: model(x)),
                "end": caught(lambda: model._odc_engine.end()),
                "minibatch": caught(lambda: minibatch(model).__enter__()),
                "step": caught(optimizer.step),
                "publish": caught(lambda: publish(model)),
                "exchange": caught(lambda: model._odc_engine.exchange("measure", {})),
                "load": caught(lambda: model.load_state_dict(model.state_dict())),
            }
            if torch.__version__ >= "2.12":  # older ones abort a forked process that starts autograd's threads
                said["backward"] = caught(output.backward)
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = json.loads(os.read(reader, 65536))
    return said, all(torch.equal(value, before[name]) for name, value in full_parameters(model))


def test_a_forked_process_trains_nothing() -> None:
    said, unchanged = ranks.in_own_process(_in_a_child)
    assert unchanged
    assert said.pop("forward") == "nothing was raised"
    for what, text in said.items():
        assert re.search(r"RuntimeError: .* in process \d+, forked from rank 0 ", text), f"{what}: {text}"


def _beside_replicated(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of a model of which `replicate` has one part and `fully_shard` the other, and of the plain one."""
    torch.manual_seed(0)
    plain, model = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    fully_shard(model[1])
    x = torch.ones(1, 4)
    return replicate(model)(x), plain(x)


def test_replicate_leaves_sharded_modules_alone() -> None:
    for sharded, plain in ranks.run(_beside_replicated, 2):
        assert torch.equal(sharded, plain)
