"""`use_odc`: failures, what was loaded or written, and what it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc_triton import minibatch, publish, use_odc
from tests.support import ranks
from tests.support.bridged import LAYOUTS, batches_of, count_of, exploding, loss_of, made, sharded, train, under_odc
from tests.support.deadlines import LONG_S
from tests.support.gradients import gradients_of
from tests.support.refusals import caught


def _divided(before: float | None, bridge: bool, **options: float) -> dict[str, torch.Tensor]:
    """Gradients. `before`: what `set_gradient_divide_factor` says; `options`: what `use_odc` is given."""
    model = sharded()
    for module in model.modules():
        if before is not None and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(before)
    with minibatch(use_odc(model, **options)) if bridge else contextlib.nullcontext():
        loss_of("both branches", model, batches_of("both branches", 0, 1)[0]).backward()
    return gradients_of(model)


def test_gradients_are_divided_as_fsdp2_divides_them() -> None:
    """On one rank: gloo can't divide by a factor."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    wanted = _divided(8.0, False)
    for before, options in ((8.0, {}), (None, {"divide_factor": 8.0}), (2.0, {"divide_factor": 8.0})):
        torch.testing.assert_close(_divided(before, True, **options), wanted)


def _recovers(rank: int, world: int) -> tuple[list[str], bool]:
    """A microbatch raises on rank 1, in the forward and then in the backward; the next minibatch is right."""
    model, batches = under_odc(), batches_of("both branches", 0, 4)
    errors = []
    for _ in exploding(model, rank == 1):
        errors.append(caught(lambda: train(model, batches[rank::2])))
        assert all(parameter.grad is None for parameter in model.parameters())
    train(model, batches[rank::2])
    plain = made("both branches", "")
    for batch in batches:
        (loss_of("both branches", plain, batch) / sum(count_of("both branches", each) for each in batches)).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), rtol=1e-5, atol=1e-6)
    return errors


def test_a_failed_minibatch_is_named_and_the_next_one_is_right() -> None:
    if not hasattr(FSDPModule, "reset_iter_state"):
        for outcome in ranks.start(_recovers, 2).join():
            assert outcome.error_type == "MinibatchFailed"
            assert "can't reset (2.13 can): start again from the last checkpoint" in outcome.error
        return
    for errors in ranks.run(_recovers, 2):
        assert len(errors) == 2
        assert all(re.match("MinibatchFailed: .*rank 1: ValueError: exploded", error) for error in errors), errors


def _dies(rank: int, world: int) -> None:
    model, batches = under_odc(timeout=LONG_S), batches_of("both branches", 0, 4)
    train(model, batches[rank::3])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    train(model, batches[rank::3])


def test_a_dead_rank_is_named() -> None:
    outcomes = ranks.start(_dies, 3).join()
    for outcome in outcomes[:2]:
        assert outcome.error_type == "RankLost", outcome
        assert "rank 2" in outcome.error.splitlines()[-1]


def _loads(rank: int, world: int) -> list[str]:
    model, other = under_odc(), made("both branches", "")
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
        message = caught(lambda: model(x))
        for _ in range(2):
            torch.distributed.barrier()
            publish(model)
            torch.testing.assert_close(model(x), other(x))
            torch.distributed.barrier()
            for parameter in (*masters, *other.parameters()):
                parameter.mul_(3)
    return message


def _generates(rank: int, world: int) -> list[tuple[list, list]]:
    """Inside and outside of a minibatch, more often and longer on rank 1: what it generates, and plain transformers."""

    def generated(model: nn.Module) -> list:
        prompt = torch.ones(1, 3, dtype=torch.long)
        return [model.generate(prompt, max_new_tokens=2 + each, do_sample=False).tolist() for each in range(1 + rank)]

    model = made("qwen2", "")
    wanted = generated(model)
    LAYOUTS["blocks"](model)
    with minibatch(use_odc(model)):
        inside = generated(model)
    return [(inside, wanted), (generated(model), wanted)]


def _said(rank: int, world: int) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        under_odc()
    return said.getvalue()


def test_what_is_loaded_generated_and_said() -> None:
    said, messages, generations = ranks.run_all(2, _said, _loads, _generates)
    # 3 units: 2 blocks of 2 * (6*6 + 6) elements and a head of 6*3 + 3.
    assert said[0].startswith("use_odc: 3 units, 10 parameters, 189 elements (189 train), on 2 ranks")
    assert said[1] == ""
    for message in messages:
        assert "was edited since it was published, and other ranks would read its former values" in message
    for generated, plain in (pair for pairs in generations for pair in pairs):
        assert generated == plain
