"""`use_odc(automatic=True)` under what frameworks do around a loop: modules around the model zero its gradients, and
checkpoints are read into optimizers that have not stepped.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule

from bench.whole import whole
from odc_triton import use_odc
from tests.support import ranks
from tests.support.bridged import LAYOUTS, batches_of, count_of, loss_of, made
from tests.support.deadlines import LONG_S

NAME = "both branches"
DEALS = ([[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 1], []], [[], [0, 2]], [[1], [0, 2]])


class _Wrapper(nn.Module):
    """As Lightning's and Fabric's around a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _made(world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = made(NAME, "")
    if world > 1:
        LAYOUTS["blocks"](model)
        with contextlib.redirect_stderr(io.StringIO()):
            use_odc(model, automatic=True, timeout=LONG_S)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None, steps: Iterable[int]) -> None:
    """`rank` None: with the microbatches of all ranks."""
    wrapper = _Wrapper(model)
    for step in steps:
        every, deal = batches_of(NAME, step, 4), DEALS[step]
        total = sum(map(count_of, [NAME] * 4, every))
        for each in chain(*deal) if rank is None else deal[rank]:
            (loss_of(NAME, model, every[each]) * (1 if rank is None else 2) / total).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        wrapper.zero_grad(set_to_none=step != 1)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(each).detach().clone() for name, each in model.named_parameters()}


def _of_ranks(rank: int, world: int, folder: str) -> Any:
    model, optimizer = _made(world)
    assert isinstance(model, FSDPModule)
    _train(model, optimizer, rank, range(3))
    dcp.save(dict(zip("mo", get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder)
    _train(model, optimizer, rank, range(3, 5))
    undisturbed = _weights(model)

    model, optimizer = _made(world)
    saved = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
    stateless = torch.optim.SGD(model.parameters(), lr=0.1)
    get_optimizer_state_dict(model, stateless)
    begun = vars(model)["_odc_engine"].automatic.counts.minibatches
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["m"], optim_state_dict=saved["o"])
    _train(model, optimizer, rank, range(3, 5))
    return undisturbed, _weights(model), begun


def test_a_wrapper_zeroes_and_a_checkpoint_is_read_before_the_first_step(tmp_path: Path) -> None:
    """Some ranks have no microbatch in a step."""
    model, optimizer = _made(1)
    _train(model, optimizer, None, range(5))
    for undisturbed, resumed, begun in ranks.run(_of_ranks, 2, str(tmp_path)):
        assert begun == 0
        torch.testing.assert_close([undisturbed, resumed], [_weights(model)] * 2, rtol=0, atol=1e-6)
