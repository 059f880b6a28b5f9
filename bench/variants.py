"""The ways to train to compare: FSDP2 in two settings, DDP, our transport with a barrier per layer, ODC, split ODC.

Every variant trains the same model on the same samples with the same optimizer; they differ in how ranks wait for each
other and in how samples are assigned. On the CPU each records events in the engine's form: "wait" is time blocked in a
collective or a barrier, including the data's transfer. On GPUs the host's clock sees no waiting: see suites/alone.py.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.nn.parallel import DistributedDataParallel

from odc_triton.base.events import Event, EventLog
from odc_triton.checkpoint.repeat import repeating
from odc_triton.comm.layout import find_units
from odc_triton.engine.minibatch import minibatch
from odc_triton.fsdp2.bridge import use_odc
from odc_triton.fsdp2.found import replace_comms
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.jobs.reports.fsdp2_record import TimedComm
from odc_triton.packs.collate import Pack, pack_collate
from odc_triton.plan.fields import IGNORED
from odc_triton.plan.planner import SPLIT
from odc_triton.sequence.enable import enable_split
from odc_triton.sharding.shard_module import fully_shard

from .trees import REPEATED, SHARED, TREES

LEARNING_RATE = 3e-4
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where variants run and the dtype they compute in; masters, optimizer states and sums of gradients are fp32."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def here(self) -> torch.device:
        """This rank's device."""
        return torch.device("cpu") if self.device == "cpu" else torch.device("cuda", torch.cuda.current_device())

    @property
    def policy(self) -> MixedPrecisionPolicy:
        if self.dtype == "fp32":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def mesh(self) -> DeviceMesh:
        """All ranks."""
        return init_device_mesh(self.device, (dist.get_world_size(),))

    def synchronize(self) -> None:
        """Waits until this rank's device has done all enqueued work."""
        if self.device == "cuda":
            torch.cuda.synchronize()


class Variant(ABC):
    """One model under one way to train. `balance`: how its samples are assigned; SPLIT: the longest in segments."""

    name: ClassVar[str]
    balance: ClassVar[str]
    records_waiting: ClassVar[bool] = True
    averages: ClassVar[bool] = True  # gradients over the ranks, as FSDP2 and DDP do

    def __init__(
        self, build: Callable[[], nn.Module], setting: Setting | None = None, *, split_tokens: int = 0
    ) -> None:
        """`split_tokens`: of each rank, the most tokens of a minibatch that others may read; for SPLIT only."""
        self.setting = setting or Setting()
        self.split_tokens = split_tokens
        self.log = EventLog(dist.get_rank())
        model = build()
        model.train()
        enable_packing(model)
        self.blocks = [model.get_submodule(name) for name in find_units(model)]
        self.model = self.shard(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    @abstractmethod
    def shard(self, model: nn.Module) -> nn.Module: ...

    def gradients(self, packs: Sequence[Pack], total_tokens: int) -> float:
        """Runs this rank's microbatches until the gradients of all ranks have landed; returns the summed loss.

        `packs`: on this rank's device. `total_tokens`: targets of all ranks' packs together.
        """
        # A variant that averages over the ranks gets a scaled loss, so that the mean is the sum over tokens.
        scale = (dist.get_world_size() if self.averages else 1) / total_tokens
        total = torch.zeros(())
        for index, pack in enumerate(packs):
            self.before_microbatch(last=index == len(packs) - 1)
            total = total + self.microbatch(index, pack, scale)
        return total.item()

    def before_microbatch(self, *, last: bool) -> None:  # noqa: B027  most variants have nothing to do
        """`last`: this rank's last in the minibatch."""

    def step(self) -> None:
        with self.events_log().span("step", microbatch=-1):
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def events_log(self) -> EventLog:
        return self.log

    def events(self) -> list[Event]:
        return self.events_log().drain()

    def start_minibatch(self, index: int) -> None:
        self.log.minibatch = index

    def microbatch(self, index: int, pack: Pack, scale: float) -> torch.Tensor:
        """Forward and backward of one pack with the loss scaled; returns the unscaled summed loss, on the device."""
        self.log.microbatch = index
        with self.log.span("forward"), self.computing():
            loss = self.loss(pack)
        with self.log.span("backward"):
            (loss * scale).backward()
        return loss.detach()

    def loss(self, pack: Pack) -> torch.Tensor:
        """Of one pack, summed over its target tokens."""
        return summed_loss(self.model, pack)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """A context around each forward."""
        return contextlib.nullcontext()


def shard_by_fsdp2(model: nn.Module, blocks: Sequence[nn.Module], setting: Setting, **options: Any) -> None:
    """Block by block, then the rest."""
    for part in (*blocks, model):
        fsdp2_fully_shard(part, mesh=setting.mesh(), mp_policy=setting.policy, **options)


class Fsdp2(Variant):
    """FSDP2 with its defaults: every layer gathers in forward and backward and reduces in backward.

    In bf16 it reduces in fp32, as every variant here does: twice the bytes of FSDP2's default.
    """

    name = "FSDP2 + global packing"
    balance = "global"
    reshard: ClassVar[bool | None] = None  # FSDP2's own default: all units but the root

    def shard(self, model: nn.Module) -> nn.Module:
        shard_by_fsdp2(model, self.blocks, self.setting, reshard_after_forward=self.reshard)
        if self.setting.device == "cpu":
            replace_comms(model, lambda comm, label: TimedComm(comm, label, self.log))
        return model


class Fsdp2Micro(Fsdp2):
    name = "FSDP2 + LB-Micro"
    balance = "micro"


class Fsdp2NoReshard(Fsdp2):
    """FSDP2's fastest setting for gradient accumulation: gather in the first microbatch, reduce in the last.

    Ranks may then run different numbers of microbatches (at least one each), at the price of unsharded memory.
    """

    name = "FSDP2 no reshard + LB-Mini"
    balance = "mini"
    reshard = False

    def before_microbatch(self, *, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        self.model.set_is_last_backward(last)


class Fsdp2Trees(Fsdp2NoReshard):
    """The same, where a pack computes a prompt once for all of its completions, as PrefixGrouper does: a group is on
    one rank, and a rank without one takes part in the collectives with a pack of two tokens.
    """

    name = "FSDP2 no reshard + a tree per rank"
    balance = TREES

    def gradients(self, packs: Sequence[Pack], total_tokens: int) -> float:
        nothing = pack_collate([[{"input_ids": [0, 0], "labels": [IGNORED, IGNORED]}]])
        return super().gradients(packs or nothing, total_tokens)


class Fsdp2SymmetricMemory(Fsdp2Micro):
    """FSDP2 at its fastest on one host's GPUs: NCCL gathers by copy engines from symmetric memory, and reduces in a
    group of its own where torch has that. On the CPU, and with torch 2.11, the same as FSDP2.
    """

    name = "FSDP2 symmetric memory + LB-Micro"

    def shard(self, model: nn.Module) -> nn.Module:
        if self.setting.device == "cpu" or not hasattr(FSDPModule, "set_symm_mem_for_comm"):
            return super().shard(model)
        os.environ["NCCL_CTA_POLICY"] = "2"  # copy engines; read when the first collective makes its communicator
        model = super().shard(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()
        if hasattr(model, "set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group()
        return model


class Unsharded(Variant):
    """Plain torch in every process, without communication: the cost of compute alone.

    In bf16 it computes under autocast from the embedding on, so that activations are bf16, as FSDP2's are.
    """

    name = "unsharded"
    balance = "mini"
    averages = False

    def shard(self, model: nn.Module) -> nn.Module:
        if self.setting.dtype == "bf16":
            model.get_input_embeddings().register_forward_hook(lambda _module, _inputs, out: out.bfloat16())
        return model.to(self.setting.here)

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self.setting.device, torch.bfloat16, enabled=self.setting.dtype == "bf16")


class Ddp(Unsharded):
    """DDP, all-reducing in the last microbatch only. Its waiting is part of its backward and is not recorded."""

    records_waiting = False
    averages = True
    name = "DDP no_sync + LB-Mini"

    def shard(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(super().shard(model))

    def before_microbatch(self, *, last: bool) -> None:
        self.model.require_backward_grad_sync = last


class Odc(Variant):
    name = "ODC + LB-Mini"
    balance = "mini"
    exact = False

    def shard(self, model: nn.Module) -> nn.Module:
        setting = self.setting
        how = {"mesh": setting.mesh(), "mp_policy": setting.policy, "backend": setting.device}
        return fully_shard(model, exact=self.exact, **how)

    def gradients(self, packs: Sequence[Pack], total_tokens: int) -> float:
        tokens = total_tokens if dist.get_rank() == 0 else 0
        run = partial(self._minibatch, packs, tokens)
        return repeating(run) if self.exact else run()

    def _minibatch(self, packs: Sequence[Pack], tokens: int) -> float:
        total = torch.zeros(())
        with minibatch(self.model, tokens=tokens, split=getattr(packs, "split", None)) as mb:
            for pack in packs:
                loss = self.loss(pack)
                (loss / mb.tokens).backward()
                total = total + loss.detach()
        return total.item()

    def events_log(self) -> EventLog:
        return self.model._odc_engine.events


class Bridged(Odc):
    """A model of torch's own fully_shard, with its defaults, under use_odc."""

    name = "FSDP2 + use_odc + LB-Mini"

    def shard(self, model: nn.Module) -> nn.Module:
        shard_by_fsdp2(model, self.blocks, self.setting)
        return use_odc(model, backend=self.setting.device)


class OdcSplit(Odc):
    """The same with the longest samples cut over ranks, where that promises to gain."""

    name = "ODC + split"
    balance = SPLIT

    def shard(self, model: nn.Module) -> nn.Module:
        model = super().shard(model)
        enable_split(model, tokens=self.split_tokens)
        return model


class OdcTrees(Odc):
    """Samples that share a prefix are on one rank; each pack computes it once."""

    name = "ODC + a tree per rank"
    balance = TREES


class OdcRepeated(Odc):
    """They may be on several ranks, each of which computes the prefix."""

    name = "ODC + repeated prefixes"
    balance = REPEATED


class OdcShared(OdcSplit):
    """They may read a prefix from the ranks that compute it, where that promises to gain."""

    name = "ODC + shared prefixes"
    balance = SHARED


class OdcExact(Odc):
    """The same, summing gradients as integers."""

    name = "ODC, exact sums"
    exact = True


class OdcMicro(Odc):
    name = "ODC + LB-Micro"
    balance = "micro"


class LayerBarrier(Odc):
    """Our transport, but with a barrier at every layer of every forward and backward, as FSDP's collectives do.

    On GPUs the devices synchronise, not the hosts: an all-reduce of one number on the compute stream.
    """

    name = "layer barrier + global packing"
    balance = "global"

    def shard(self, model: nn.Module) -> nn.Module:
        for block in self.blocks:
            block.register_forward_pre_hook(self._exchange)
            block.register_full_backward_pre_hook(self._exchange)
        self._number = torch.zeros(1, device=self.setting.here)
        return super().shard(model)

    def _exchange(self, *_: Any) -> None:
        if self.setting.device == "cuda":
            dist.all_reduce(self._number)
            return
        start_s = time.monotonic()
        dist.barrier()
        self.events_log().add("wait", start_s, time.monotonic(), label="barrier")
