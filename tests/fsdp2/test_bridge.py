"""`use_odc`: precision, failures, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.support import ranks
from tests.support.bridged import LAYOUTS, Branches, batches_of, count_of, loss_of, made


def _model(**options: Any) -> nn.Module:
    model = made("both branches", "")
    LAYOUTS["blocks"](model, **options)
    return model


def _bridged(**options: Any) -> nn.Module:
    from odc_triton import use_odc

    return use_odc(_model(), **options)


def _train(model: nn.Module, batches: list[tuple], name: str = "both branches") -> None:
    from odc_triton import minibatch

    with minibatch(model, tokens=sum(count_of(name, batch) for batch in batches)) as mb:
        for batch in batches:
            (loss_of(name, model, batch) / mb.tokens).backward()


# ---------------------------------------------------------------------- precision


def _gradients(rank: int, world: int, transform: str, policy: dict[str, Any], bridge: bool) -> list[dict]:
    """Gradients of two steps; two microbatches a rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from odc_triton import minibatch, use_odc

    model = made("qwen2", transform)
    LAYOUTS["blocks"](model, mp_policy=MixedPrecisionPolicy(**policy))
    if bridge:
        use_odc(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.1)
    found = []
    for step in range(2):
        mine = batches_of("qwen2", step, 4)[rank::2]
        if bridge:
            with minibatch(model):
                for batch in mine:
                    (loss_of("qwen2", model, batch) / 40).backward()
        else:
            for batch in mine:
                (loss_of("qwen2", model, batch) / 40).backward()
        found.append({name: parameter.grad.full_tensor() for name, parameter in trained.items()})
        assert all(found[-1][name].dtype == parameter.dtype for name, parameter in trained.items())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("transform", "policy"),
    [
        ("", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
        ("lora, bf16 base", {}),  # units of two dtypes, which FSDP2 gathers as bytes
    ],
    ids=["bf16", "two dtypes"],
)
def test_gradients_are_those_of_fsdp2(transform: str, policy: dict[str, Any]) -> None:
    """The same forward and backward in bf16, bit by bit, so only the order of fp32 sums differs."""
    wanted = ranks.run(_gradients, 2, transform, policy, False)[0]
    gradients = ranks.run(_gradients, 2, transform, policy, True)[0]
    # After one step a weight may be rounded to another bf16 number.
    for step, tolerance in ((0, 1e-6), (1, 2e-2)):
        for name, gradient in wanted[step].items():
            largest = gradient.abs().max().item()
            torch.testing.assert_close(
                gradients[step][name], gradient, rtol=0, atol=tolerance * largest, msg=lambda m, n=name: f"{n}: {m}"
            )


# ---------------------------------------------------------------------- failures


def _recovers(rank: int, world: int) -> tuple[list[str], bool]:
    """A microbatch raises on rank 1, in the forward and then in the backward; the next minibatch is right."""
    from odc_triton import MinibatchFailed

    model, batches = _bridged(), batches_of("both branches", 0, 4)
    errors = []

    def explode(*_: Any) -> None:
        raise ValueError("exploded")

    for register in (nn.Module.register_forward_pre_hook, nn.Module.register_full_backward_pre_hook):
        hook = register(model.blocks[0], explode)
        if rank != 1:
            hook.remove()
        try:
            _train(model, batches[rank::2])
        except MinibatchFailed as error:
            errors.append(str(error))
        hook.remove()
        assert all(parameter.grad is None for parameter in model.parameters())
    _train(model, batches[rank::2])
    got = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    plain = made("both branches", "")
    for batch in batches:
        (loss_of("both branches", plain, batch) / sum(count_of("both branches", each) for each in batches)).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-5, atol=1e-6)
    return errors


def test_a_failed_minibatch_is_named_and_the_next_one_is_right() -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        for outcome in ranks.start(_recovers, 2).join():
            assert outcome.error_type == "MinibatchFailed"
            assert "can't reset (2.13 can): start again from the last checkpoint" in outcome.error
        return
    for errors in ranks.run(_recovers, 2):
        assert len(errors) == 2
        assert all("rank 1: ValueError: exploded" in error for error in errors), errors


def _dies(rank: int, world: int) -> None:
    model, batches = _bridged(timeout=timedelta(seconds=20)), batches_of("both branches", 0, 4)
    _train(model, batches[rank::3])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    _train(model, batches[rank::3])


def test_a_dead_rank_is_named() -> None:
    outcomes = ranks.start(_dies, 3).join()
    for outcome in outcomes[:2]:
        assert outcome.error_type == "RankLost", outcome
        assert "rank 2" in outcome.error.splitlines()[-1]


def _comes_late(rank: int, world: int) -> None:
    import time

    model = _bridged()
    _train(model, [])
    model._odc_engine.meetings.timeout_s = 1.0  # the ranks may have started further apart
    if rank == 1:
        time.sleep(2.5)
    _train(model, [])


def test_a_late_rank_is_named() -> None:
    outcome = ranks.start(_comes_late, 2).join()[0]
    assert outcome.error_type == "DeadlineExceeded", outcome
    assert "rank 1" in outcome.error.splitlines()[-1]


# ---------------------------------------------------------------------- checkpoints and writes by hand


def _loads(rank: int, world: int) -> list[str]:
    from odc_triton import publish

    model, other = _bridged(), made("both branches", "")
    masters = list(model.parameters())
    x = torch.ones(3, 6)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
        before = model(x)
        full = {name: parameter.detach() for name, parameter in other.named_parameters()}
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model.reshard()
        set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
        for _ in range(rank + 1):
            torch.testing.assert_close(model(x), other(x))
        assert not torch.equal(before, model(x))
        for parameter in (*masters, *other.parameters()):  # the root's whole ones are still those of the evaluation
            parameter.mul_(0.5)
        message = _error(lambda: model(x))
        for _ in range(2):
            torch.distributed.barrier()
            publish(model)
            torch.testing.assert_close(model(x), other(x))
            torch.distributed.barrier()
            for parameter in (*masters, *other.parameters()):
                parameter.mul_(3)
    return message


def test_evaluation_sees_what_was_loaded_or_published() -> None:
    for message in ranks.run(_loads, 2):
        assert "written after they were published: call publish(model)" in message


# ---------------------------------------------------------------------- refusals


def _error(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _hooked() -> nn.Module:
    model = _model()
    model.blocks[0].set_all_reduce_hook(lambda gradient: None)
    return model


def _with_own_comm() -> nn.Module:
    model = _model()
    model.blocks[1].set_custom_all_gather(object())
    return model


def _accumulating() -> nn.Module:
    model = _model()
    model.set_requires_gradient_sync(False)
    return model


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Branches()
    LAYOUTS["blocks"](model)
    return model


def _two_factors() -> nn.Module:
    model = _model()
    model.set_gradient_divide_factor(3.0)
    return model


def _offloaded() -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return _model(offload_policy=CPUOffloadPolicy(pin_memory=False))


def _float8() -> nn.Module:
    """A tensor of which FSDP2 gathers something else."""
    from torch.testing._internal.two_tensor import TwoTensor

    for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
        setattr(TwoTensor, name, lambda *words, **options: None)
    model = made("both branches", "")
    weight = model.head.weight.detach()
    model.head.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    LAYOUTS["blocks"](model)
    return model


def _two_meshes() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = made("both branches", ""), init_device_mesh("cpu", (1, 2), mesh_dim_names=("other", "ep"))
    fully_shard(model.blocks[0], mesh=mesh["ep"])
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def _own_allocator() -> nn.Module:
    model = _model()
    model.set_allocate_memory_from_process_group_for_comm(True)
    return model


def _replicated_only() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    return _model(mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))


def _tensor_parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh, model = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), Branches()
    parallelize_module(model.blocks[0].ways["odd"], mesh["tp"], ColwiseParallel())
    LAYOUTS["blocks"](model, mesh=mesh["dp"])
    return model


REFUSED = [
    (lambda: nn.Linear(2, 2), "TypeError: Linear is not sharded by torch's fully_shard: call it on the model"),
    (lambda: "model", "TypeError: use_odc takes an nn.Module, not a str"),
    (_hooked, "NotImplementedError: unit blocks.0 has an all-reduce hook"),
    (_with_own_comm, "NotImplementedError: unit blocks.1 communicates by object: leave out set_custom_all_gather"),
    (_accumulating, "NotImplementedError: set_requires_gradient_sync(False) on unit the root"),
    (_on_meta, "ValueError: head.weight is on the meta device: call to_empty"),
    (_two_factors, "ValueError: units have different gradient divide factors, ['3.0', 'None']: give divide_factor"),
    (_offloaded, "NotImplementedError: head.weight is offloaded to the CPU: leave out offload_policy"),
    (_float8, "NotImplementedError: head.weight is a TwoTensor, which FSDP2 converts before it gathers (fp8)"),
    (_two_meshes, "on 2 meshes"),
    (
        _own_allocator,
        "leave out set_custom_all_gather, set_custom_reduce_scatter, set_allocate_memory_from_process_group",
    ),
    (_replicated_only, "is replicated over 2 ranks and split over one: shard over at least two ranks"),
    (_tensor_parallel, "Tensor and expert parallelism can't be combined with on-demand communication"),
]


def _refusals(rank: int, world: int) -> list[str]:
    from odc_triton import use_odc

    return [_error(lambda make=make: use_odc(make(), timeout=timedelta(seconds=20))) for make, _ in REFUSED]


def test_refused_by_name() -> None:
    for messages in ranks.run(_refusals, 2):
        for message, (_, wanted) in zip(messages, REFUSED, strict=True):
            assert wanted in message


def _step_inside(model: nn.Module) -> None:
    from odc_triton import minibatch

    with minibatch(model):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def _clip_inside(model: nn.Module) -> None:
    from odc_triton import minibatch

    with minibatch(model):
        model(torch.ones(3, 6)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _no_sync(model: nn.Module) -> None:
    from odc_triton import minibatch

    with minibatch(model):
        model.set_requires_gradient_sync(False)
        model(torch.ones(3, 6)).sum().backward()


def _no_sync_in_the_backward(model: nn.Module) -> None:
    from odc_triton import minibatch

    with minibatch(model):
        loss = model(torch.ones(3, 6)).sum()
        model.set_requires_gradient_sync(False)
        loss.backward()


def _freeze(model: nn.Module) -> None:
    model.head.weight.requires_grad_(False)
    _train(model, [])


def _gradient_hook(model: nn.Module) -> None:
    model.head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    _train(model, [])


def _other_factor(model: nn.Module) -> None:
    model.set_gradient_divide_factor(2.0)
    _train(model, [])


def _deterministic(model: nn.Module) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        _train(model, [])
    finally:
        torch.use_deterministic_algorithms(False)


def _split(model: nn.Module) -> None:
    from odc_triton import minibatch

    with minibatch(model, split=object()):
        pass


def _enable_split(model: nn.Module) -> None:
    from odc_triton import enable_split

    enable_split(model, tokens=64)


def _again(model: nn.Module) -> None:
    from odc_triton import use_odc

    use_odc(model)


MISUSED = [
    (_step_inside, "optimizer step inside a minibatch"),
    (_clip_inside, "p.grad inside a minibatch"),
    (lambda model: model(torch.ones(3, 6)).sum().backward(), "backward outside of a minibatch: put it into `with"),
    (_no_sync, "Inside a minibatch every backward adds to the owners' shards"),
    (_no_sync_in_the_backward, "set_requires_gradient_sync(False) on unit"),
    (_freeze, "head.weight was frozen after use_odc: choose what trains before use_odc"),
    (_gradient_hook, "head.weight has a gradient hook"),
    (_other_factor, "set_gradient_divide_factor(2.0) came after use_odc: give it to use_odc"),
    (_deterministic, "for exact sums shard it by odc_triton.fully_shard(model, exact=True)"),
    (_split, "this minibatch splits sequences, and the model is one of torch's fully_shard"),
    (_enable_split, "needs a model of odc_triton.fully_shard"),
    (_again, "ValueError: FSDPBranches trains by on-demand communication already: call use_odc once"),
]


def _misuses(rank: int, world: int) -> list[str]:
    return [_error(lambda misuse=misuse: misuse(_bridged())) for misuse, _ in MISUSED]


def test_misuse_says_what_to_do() -> None:
    for messages in ranks.run(_misuses, 2):
        for message, (_, wanted) in zip(messages, MISUSED, strict=True):
            assert wanted in message


def _differ(rank: int, world: int) -> str:
    from odc_triton import use_odc

    model = made("both branches", "")
    model.head.weight.requires_grad_(rank == 0)
    LAYOUTS["blocks"](model)
    return _error(lambda: use_odc(model))


def test_models_that_differ() -> None:
    for message in ranks.run(_differ, 2):
        assert message.startswith("RanksDiffer: use_odc: rank ")
        assert '"head.weight"' in message


def _said(rank: int, world: int) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        _bridged()
    return said.getvalue()


def test_it_says_what_it_found() -> None:
    """3 units: 2 blocks of 2 * (6*6 + 6) elements and a head of 6*3 + 3."""
    first, second = ranks.run(_said, 2)
    assert first.startswith("use_odc: 3 units, 10 parameters, 189 elements (189 train), on 2 ranks")
    assert second == ""
