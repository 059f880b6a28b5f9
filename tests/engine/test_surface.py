"""The surface of FSDP2: each method and argument done, a documented no-op, or refused by name; and nn.Module's own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard

from odc_triton import (
    MixedPrecisionPolicy,
    full_parameters,
    fully_shard,
    minibatch,
    publish,
    register_fsdp_forward_method,
)
from odc_triton.engine.module import ODCModule
from tests.support import ranks
from tests.support.gradients import gradients_of
from tests.support.models import build

IDS = torch.tensor([[5, 9, 3, 17, 40, 2], [7, 7, 30, 11, 4, 90]])


def _names(cls: type) -> set[str]:
    return {name for name, value in vars(cls).items() if callable(value) and not name.startswith("_")}


def test_methods_of_fsdp_module() -> None:
    names = sorted(_names(fsdp.FSDPModule))
    missing = [name for name in names if not hasattr(ODCModule, name)]
    assert not missing, f"torch {torch.__version__}'s FSDPModule has methods that ODCModule lacks: {missing}"
    for name in names:
        ours, theirs = getattr(ODCModule, name), getattr(fsdp.FSDPModule, name)
        assert ours.__doc__ or ours.__annotations__["return"] == "NoReturn", f"{name} says nothing"
        theirs, ours = inspect.signature(theirs).parameters, inspect.signature(ours).parameters
        assert list(ours) == list(theirs), name
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()], name


def _of_newer_torch(rank: int, world: int) -> None:
    """FSDP2's loop with a finalization of its own, under every torch."""
    model = fully_shard(nn.Linear(3, 2))
    model.set_keep_unsharded_storage(False)
    with pytest.raises(NotImplementedError, match="set_keep_unsharded_storage"):
        model.set_keep_unsharded_storage(True)
    model.set_manual_backward_finalization(True)
    with minibatch(model):
        model(torch.ones(1, 3)).sum().backward()
        model.finalize_backward(async_op=True).wait()
        assert model.finalize_backward() is None
    assert (model.bias.grad.full_tensor() == 1).all()


def test_arguments_of_fully_shard() -> None:
    ours, theirs = inspect.signature(fully_shard).parameters, inspect.signature(fsdp.fully_shard).parameters
    for name, parameter in theirs.items():
        assert name in ours, f"fully_shard({name}=) is missing"
        assert ours[name].kind is parameter.kind
        assert name == "module" or f"{name}:" in fully_shard.__doc__ or name in fully_shard.__doc__


def test_fields_of_mixed_precision_policy() -> None:
    names = {field.name for field in dataclasses.fields(fsdp.MixedPrecisionPolicy)}
    refused = names - {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
    unknown = refused - {"param_dtype_override_fn"}  # of torch 2.15
    assert not unknown, f"torch {torch.__version__}'s policy has fields that fully_shard does not look at: {unknown}"
    for name in refused:
        with pytest.raises(NotImplementedError, match=name):
            fully_shard(nn.Linear(2, 2), mp_policy=fsdp.MixedPrecisionPolicy(**{name: print}))


def _every_method(rank: int, world: int) -> None:
    """Calls each with a likely argument on a sharded model: it works, or names what it refuses."""
    model = fully_shard(build("qwen2"))
    likely = {"factor": 2.0, "modules": [], "comm": object(), "hook": print, "event": None, "max_input_buffers": 2}
    refused = {}
    for name in sorted(_names(fsdp.FSDPModule)):
        method = getattr(model, name)
        required = [p.name for p in inspect.signature(method).parameters.values() if p.default is p.empty]
        try:
            method(**{argument: likely.get(argument, True) for argument in required})
        except NotImplementedError as error:
            refused[name] = str(error)
    assert model(IDS, use_cache=False).logits.isfinite().all()
    methods = {"set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"}
    newer = {"set_keep_unsharded_storage"} & _names(fsdp.FSDPModule)  # of torch 2.15
    assert refused.keys() == methods | newer
    for name, text in refused.items():
        assert name in text


def _as_fsdp2_takes_them(rank: int, world: int) -> None:
    """Models and options that FSDP2 takes: the same gradients as of a plain model."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 4))
        layers[3].weight = layers[0].weight
        return layers

    def a_unit_without_parameters(layers: nn.Module) -> nn.Module:
        for layer in (layers[1], layers[2]):
            fully_shard(layer)
        return fully_shard(layers)

    def a_list(layers: nn.Module) -> nn.Module:
        given = [layers[0], layers[3]]
        assert fully_shard(given) is given
        return fully_shard(layers)

    def a_list_without_its_root(layers: nn.Module) -> nn.Module:
        fully_shard([layers[0], layers[1], layers[3], layers[3]])
        return layers

    def defaults(layers: nn.Module) -> nn.Module:
        return fully_shard(layers, offload_policy=fsdp.OffloadPolicy(), shard_placement_fn=lambda p: Shard(-p.ndim))

    def under_a_default_device(layers: nn.Module) -> nn.Module:
        with torch.device("meta"):
            return fully_shard(layers)

    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    plain = model()
    plain(x).square().sum().backward()
    for shard in (a_unit_without_parameters, a_list, a_list_without_its_root, defaults, under_a_default_device):
        sharded = shard(model())
        with minibatch(sharded if shard is not a_list_without_its_root else sharded[0]):
            sharded(x).square().sum().backward()
        # The same batch on both ranks, divided by their number: the same bits.
        torch.testing.assert_close(gradients_of(sharded), gradients_of(plain), rtol=0, atol=0, msg=shard.__name__)
    with torch.device("meta"):
        built = fully_shard(model())
    assert {each.device.type for each in [*built.parameters(), *built.buffers()]} == {"cpu"}
    assert built(x).isfinite().all()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.loose = nn.Parameter(torch.ones(2))  # passed in ignored_params
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x + self.offset)


def _sharded_small() -> nn.Module:
    torch.manual_seed(0)
    model = Small()
    return fully_shard(model, ignored_params={model.loose})


def _kept(rank: int, world: int) -> None:
    model = _sharded_small()
    model.loose.share_memory_()
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    want = model.eval()(torch.ones(2, 4)).clone()
    for change in (
        lambda: model.to("cpu"),
        lambda: model.cpu(),
        lambda: model.float(),
        lambda: model.to(torch.float32),
        lambda: model.to_empty(device="cpu"),
        lambda: model.share_memory(),
        lambda: model.train().eval(),
        lambda: model.apply(lambda module: None),
        lambda: model.requires_grad_(False).requires_grad_(True),
    ):
        assert change() is model
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
        torch.testing.assert_close(model(torch.ones(2, 4)), want, rtol=0, atol=0)
    assert model.offset.is_shared()


def _refused(rank: int, world: int) -> None:
    model = _sharded_small()
    loose = model.loose
    before = {name: value.full_tensor().clone() for name, value in model.named_parameters() if name != "loose"}
    for change, words in (
        (lambda: model.double(), "float64"),
        (lambda: model.to(torch.bfloat16), "bfloat16"),
        (lambda: model.half(), "float16"),
        (lambda: model.to("meta"), "meta"),
        (lambda: model.to_empty(device="meta"), "meta"),
        (lambda: model.load_state_dict(model.state_dict(), assign=True), "assign"),
    ):
        with pytest.raises(RuntimeError, match=words):
            change()
    with minibatch(model), pytest.raises(RuntimeError, match="inside a minibatch"):
        model.load_state_dict(model.state_dict())
    now = {name: model.get_parameter(name).full_tensor() for name in before}
    torch.testing.assert_close(now, before, rtol=0, atol=0)
    assert model.loose is loose
    # What a submodule does behind the model's back is found when the parameters are published.
    model.layers[0].double()
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight is no longer in the shared heap"):
        publish(model)


def _state_dicts(rank: int, world: int) -> None:
    model = _sharded_small()
    torch.manual_seed(5)
    other = Small()
    model.load_state_dict(other.state_dict())  # whole tensors
    values = {name: other.get_parameter(name).detach() for name, _ in full_parameters(model)}
    torch.testing.assert_close(dict(full_parameters(model)), values, rtol=0, atol=0)
    saved = {name: value.clone() for name, value in model.state_dict().items()}  # DTensors
    seen = []
    model.register_state_dict_post_hook(lambda module, state, prefix, local: seen.append(sorted(state)))
    model.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.append(len(state)))
    torch.distributed.barrier()  # a slower rank may still read what is zeroed now
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert sorted(model.state_dict()) == sorted(other.state_dict())
    assert seen == [len(saved), sorted(other.state_dict())]
    torch.testing.assert_close(dict(full_parameters(model)), values, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.weight"):
        model.load_state_dict(other.state_dict() | {"layers.0.weight": torch.ones(9, 4)})
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({})
    assert model.load_state_dict({}, strict=False).missing_keys


def test_whole_tensors_below_a_wrapper() -> None:
    other, model = Small(), Small()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model = fully_shard(model)
    model.load_state_dict(other.state_dict())
    for (_, value), want in zip(full_parameters(model), other.parameters(), strict=True):
        assert torch.equal(value, want)


def _frozen_later(rank: int, world: int) -> None:
    model = _sharded_small()
    model.layers[0].requires_grad_(False)
    with minibatch(model):
        model(torch.randn(3, 4)).sum().backward()
    assert model.layers[0].weight.grad is None
    assert model.layers[2].weight.grad is not None
    model.layers[0].requires_grad_(True)
    with minibatch(model):
        model(torch.randn(3, 4)).sum().backward()
    assert model.layers[0].weight.grad is not None


def _sliced(rank: int, world: int) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    part = model[1:]
    assert type(part) is nn.Sequential
    assert len(part) == 1


def _fused_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """As fused losses do: the body's states, and the head's weight read directly."""
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = nn.functional.linear(states, model.lm_head.weight)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def _head_norm(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block.mlp(x).square().sum()


def _assert_gradients(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> None:
    plain = build("qwen2")
    loss(plain).backward()
    # fp32 sums in another order: 1e-7 per operation; the floor is for sums that cancel.
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-4, atol=1e-6)


def _unsharded(rank: int, world: int) -> None:
    model = fully_shard(build("qwen2"))
    with minibatch(model, tokens=5) as mb:
        assert model.unshard() is None
        assert model.unshard(async_op=True).wait() is None
        (_fused_loss(model, IDS[rank : rank + 1]) / mb.tokens).backward()
        assert model.lm_head.weight.shape == (97, 32)
        assert not hasattr(model.lm_head.weight, "full_tensor")
        model.reshard()
        assert hasattr(model.lm_head.weight, "full_tensor")
    _assert_gradients(model, lambda plain: _fused_loss(plain, IDS) / 10)


def _custom_methods(rank: int, world: int) -> None:
    model = build("qwen2")
    type(model).fused_loss = _fused_loss
    type(model.model.layers[1]).head_norm = _head_norm
    fully_shard(model)
    register_fsdp_forward_method(model, "fused_loss")
    register_fsdp_forward_method(model.model.layers[1], "head_norm")
    register_fsdp_forward_method(model.model, "forward")  # not a unit: left alone
    with pytest.raises(AttributeError, match="nothing_like_it"):
        register_fsdp_forward_method(model, "nothing_like_it")
    with minibatch(model, tokens=5) as mb:
        (model.fused_loss(IDS[rank : rank + 1]) / mb.tokens).backward()
    _assert_gradients(model, lambda plain: _fused_loss(plain, IDS) / 10)
    x = torch.linspace(-1, 1, 64).view(2, 32)
    with minibatch(model, tokens=1):
        model.model.layers[1].head_norm(x[rank]).backward()
    _assert_gradients(model, lambda plain: _head_norm(plain.model.layers[1], x))


def _loaded_while_held(rank: int, world: int) -> None:
    model = fully_shard(nn.Linear(4, 4), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    model.unshard()
    model.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    for name, value in full_parameters(model):
        assert (value == 1).all(), name


def test_in_ranks() -> None:
    ranks.run_all(2, _of_newer_torch, _every_method, _as_fsdp2_takes_them, _kept, _refused, _state_dicts)
    ranks.run_all(2, _frozen_later, _sliced, _unsharded, _custom_methods, _loaded_while_held)
