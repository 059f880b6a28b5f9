"""`record_timeline`: where the ranks' time goes in a training loop, FSDP2's or odc-triton's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...base.events import Event, EventLog
from ...base.files import write_file
from ...engine.forward import tensors_in
from ...fsdp2.found import replace_comms
from .report import save_timelines
from .trace import excerpt, idle_of_ranks

_FILE = ".events.json"


class TimedComm:
    """An all-gather or reduce-scatter of FSDP2 whose calls are "wait" events. It has ended when a call returns."""

    def __init__(self, comm: Any, label: str, log: EventLog) -> None:
        self.comm, self.allocate, self._label, self._log = comm, comm.allocate, label, log

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        finish = torch.cuda.synchronize if input_tensor.is_cuda else lambda: None
        finish()
        with self._log.span("wait", label=self._label):
            if (work := self.comm(output_tensor, input_tensor, **options)) is not None:
                work.wait()
            finish()
        return work


class record_timeline:
    """Records, from now until `save`, where this rank's time goes in the loop that trains `model`.

    `model`: the module that the loop calls, of torch's `fully_shard`, or of odc-triton's `fully_shard` or `use_odc`.

    FSDP2 waits in its all-gathers and reduce-scatters, transfers included; odc-triton in barriers and for locks. Only
    forward, backward and optimizer steps are recorded: the rest of the loop (`clip_grad_norm_`, collectives of its own)
    counts as idle; FSDP2's all-reduce between replicas counts as backward.

    It has not run on a GPU. There the host waits for the device around each collective of FSDP2: nothing overlaps, so
    steps take longer than without it, and the waits are upper bounds. It sees only the host's time of odc-triton.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._handles = model, []
        if (engine := getattr(model, "_odc_engine", None)) is not None:
            self._log = engine.events
            self._log.drain()
            return
        self._log = EventLog(dist.get_rank())
        self._running, self._start_s = "", 0.0
        replace_comms(model, lambda comm, label: TimedComm(comm, label, self._log))
        self._handles = [
            model.register_forward_pre_hook(self._forward_begins, prepend=True),
            model.register_forward_hook(self._forward_ends),
            register_optimizer_step_pre_hook(lambda *_: self._now("step")),
            register_optimizer_step_post_hook(self._step_ends),
        ]

    def save(self, folder: str | Path, name: str, *, warm_up: int = 1) -> dict[int, float]:
        """Ends the recording. Collective.

        Rank 0 prints the shares, and draws timeline.png and trace.json (for ui.perfetto.dev) of all that was saved into
        `folder`, each under its name. Other ranks wait for it.

        folder: for the files; several recordings may share it.
        name: of this recording.
        warm_up: optimizer steps at the beginning that don't count.

        Returns each rank's idle share, 0 to 1.
        """
        if "/" in name:
            raise ValueError(f"name is {name!r}; give one without a slash: files of {folder} are named after it")
        for handle in self._handles:
            handle.remove()
        if self._handles:
            replace_comms(self._model, lambda comm, label: comm.comm)
        of_ranks: list[list] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_ranks, [event.as_row() for event in self._log.drain()])
        events = [Event.of_row(row) for rows in of_ranks for row in rows]
        steps = set.intersection(*({e.minibatch for e in events if e.rank == rank} for rank in range(len(of_ranks))))
        counted = sorted(steps - {-1})
        if len(counted) <= warm_up:
            raise ValueError(f"{len(counted)} steps were recorded; train more than warm_up={warm_up} before save")
        events = excerpt({name: events}, minibatches=counted[warm_up:])[name]
        idle = idle_of_ranks(events)
        if dist.get_rank() == 0:
            folder = Path(folder)
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / f"{name}{_FILE}", json.dumps([event.as_row() for event in events]).encode())
            saved = {path.name.removesuffix(_FILE): path.read_text() for path in folder.glob(f"*{_FILE}")}
            tracks = {each: [Event.of_row(row) for row in json.loads(text)] for each, text in sorted(saved.items())}
            save_timelines(tracks, folder)
            print(f"{name}: " + ", ".join(f"rank {rank} idle {share:.1%}" for rank, share in idle.items()), flush=True)
        dist.barrier()  # a rank that exits at once would abort: gloo's thread may still free the tensors gathered above
        return idle

    def _now(self, begins: str = "") -> None:
        """What was running ends, and a span of this kind begins, if any."""
        start_s, self._start_s = self._start_s, time.monotonic()
        if self._running:
            self._log.add(self._running, start_s, self._start_s)
        self._running = begins

    def _forward_begins(self, *_: Any) -> None:
        self._now("forward")  # until its backward begins: with the loss
        self._log.minibatch += self._log.microbatch < 0
        self._log.microbatch += 1

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        watched = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        for tensor in watched:
            tensor.register_hook(self._backward_begins)
        if not watched:
            self._now()

    def _backward_begins(self, _: torch.Tensor) -> None:
        if self._running != "backward":
            self._now("backward")
            # After FSDP2's own callback, which reduces the last gradients: its hook was there first.
            torch.autograd.Variable._execution_engine.queue_callback(self._now)

    def _step_ends(self, *_: Any) -> None:
        self._log.microbatch = -1
        self._now()
