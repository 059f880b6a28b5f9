"""Jobs of a small model on pieces of samples, for split_faults.py and host_faults.py: plans, samples, one minibatch,
its ranks.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tests.support.simulated  # noqa: F401  two of BACKENDS
from odc_triton import enable_split, fully_shard, minibatch
from odc_triton.balance import CostModel, PackedDataset, count_target_tokens, pack_collate
from odc_triton.balance.pieces import Entry, MinibatchPacks, Piece, SplitPlan
from odc_triton.balance.relatives import find_relatives
from odc_triton.balance.shared import assign_shared
from odc_triton.comm.launch import die_with_parent, end_process
from odc_triton.comm.local_store import NAME, StoreServer, rendezvous_url
from odc_triton.data.records import IGNORED
from odc_triton.engine.api import engine_of
from odc_triton.hf import enable_packing, summed_loss

from .hosts_net import INTERFACE, Hosts

BACKENDS = ("cpu", "cpu-sharded", "cpu-interpreter")
LAYERS = 3
VOCABULARY = 97
_PORT = 29500  # on a host of the job's own
TOKENS = 400  # of each rank, more than any plan here lets others read
RIDER_TOKENS = 29  # of a whole sample beside pieces, in a job with a fault

Dealt = list[list[list[Entry]]]


# ------------------------------------------------------------------ work


class Deal:
    """What ranks compute in one minibatch. `packs`: by rank; `lengths`: tokens by sample; `shared`: by sample that
    branches off another, that one and the tokens that they share; `learned`: by sample, the first token that it learns,
    if not all that it computes.
    """

    def __init__(self, ranks: int) -> None:
        self.packs: Dealt = [[] for _ in range(ranks)]
        self.lengths: list[int] = []
        self.shared: dict[int, tuple[int, int]] = {}
        self.learned: dict[int, int] = {}

    def whole(self, length: int) -> int:
        self.lengths.append(length)
        return len(self.lengths) - 1

    def pieces(self, lengths: list[int]) -> list[Piece]:
        """A new sample in pieces."""
        sample, start, made = self.whole(sum(lengths)), 0, []
        for length in lengths:
            made.append(Piece(sample, start, start + length))
            start += length
        return made

    def branch(self, parent: int, tokens: int, lengths: list[int]) -> list[Piece]:
        """A new sample in pieces, which shares `tokens` with `parent` and computes the last of them."""
        while parent in self.shared and self.shared[parent][1] >= tokens:  # it does not compute the one before
            parent = self.shared[parent][0]
        sample, start, made = self.whole(tokens - 1 + sum(lengths)), tokens - 1, []
        self.shared[sample] = parent, tokens
        for length in lengths:
            made.append(Piece(sample, start, start + length, None if made else parent))
            start += length
        return made


def deal_evenly(numbers: random.Random, ranks: int, replicas: int = 1, *, trees: bool = False) -> Deal:
    """Two waves of each replica, in which each rank has two pieces and a whole sample; some have whole samples after
    them.

    A wave is one sample that goes up and down the ranks, so that each waits for all others and they for it; or a ring
    of samples over two ranks each, so that each waits for one and another waits for it. With `trees` a wave is one
    sample over all ranks with a branch on each, or a ring of samples, each with its branch on the next rank.
    """
    deal, shards = Deal(ranks), ranks // replicas
    for first in range(0, ranks, shards):
        _deal_evenly(deal, deal.packs[first : first + shards], numbers, trees)
    return deal


def _deal_evenly(deal: Deal, packs_of: Dealt, numbers: random.Random, trees: bool) -> None:
    ranks = len(packs_of)
    for _ in range(2):
        lengths = [numbers.randint(4, 20) for _ in range(2 * ranks)]
        is_one = numbers.random() < 0.5
        if trees:
            each = [lengths[:ranks]] if is_one else [[length] for length in lengths[:ranks]]
            roots = [piece for of_sample in map(deal.pieces, each) for piece in of_sample]
            pairs = [[root] for root in roots]
            for rank, length in enumerate(lengths[ranks:]):
                root = roots[-1 if is_one else rank - 1]
                pairs[rank] += deal.branch(root.sample, root.stop, [length])
        elif is_one:
            pieces = deal.pieces(lengths)
            pairs = [[pieces[rank], pieces[-1 - rank]] for rank in range(ranks)]
        else:
            rows = [deal.pieces(lengths[2 * rank : 2 * rank + 2]) for rank in range(ranks)]
            pairs = [[rows[rank][0], rows[rank - 1][1]] for rank in range(ranks)]
        for packs, pair in zip(packs_of, pairs, strict=True):
            packs.append([*pair, deal.whole(RIDER_TOKENS)])
    for packs in packs_of:
        if numbers.random() < 0.5:
            packs.append([deal.whole(numbers.randint(2, 30))])


def deal_at_random(numbers: random.Random, ranks: int, *, trees: bool = False) -> Deal:
    """Up to three waves of some of the ranks, each of one or two samples in pieces that go up and down the ranks or to
    any of them; whole samples beside pieces, and packs of whole samples between waves. With `trees` others branch off
    these samples, and off each other, anywhere, in pieces too.
    """
    deal = Deal(ranks)
    for _ in range(numbers.randint(1, 3)):
        group = numbers.sample(range(ranks), numbers.randint(2, ranks))
        wave: dict[int, list[Entry]] = {}
        for _ in range(numbers.randint(1, 2)):
            pieces = deal.pieces([numbers.randint(1, 24) for _ in range(numbers.randint(2, 2 * len(group)))])
            order = [*group, *reversed(group)] if numbers.random() < 0.5 else numbers.choices(group, k=len(pieces))
            for piece, rank in zip(pieces, order, strict=False):
                wave.setdefault(rank, []).append(piece)
            relatives = [pieces[0].sample]
            for _ in range(numbers.randint(1, 5) if trees else 0):
                parent = numbers.choice(relatives)
                lengths = [numbers.randint(2, 20) for _ in range(numbers.choice([1, 1, 2]))]
                for piece in deal.branch(parent, numbers.randint(2, deal.lengths[parent]), lengths):
                    wave.setdefault(numbers.choice(group), []).append(piece)
                relatives.append(len(deal.lengths) - 1)
        for rank, pack in wave.items():
            if not trees:  # a branch comes after what it branches off
                numbers.shuffle(pack)
            if numbers.random() < 0.4:
                pack.insert(numbers.randint(0, len(pack)), deal.whole(numbers.randint(2, 30)))
            deal.packs[rank].append(pack)
        for packs in deal.packs:
            if numbers.random() < 0.3:
                packs.append([deal.whole(numbers.randint(2, 30)) for _ in range(numbers.randint(1, 2))])
    return deal


def deal_as_planned(numbers: random.Random, ranks: int) -> Deal:
    """Families of samples, and some alone, as `assign_shared` assigns them; it cuts most of them over ranks."""
    deal = Deal(ranks)
    for _ in range(numbers.randint(1, 3)):
        root, prompt = deal.whole(numbers.randint(120, 200)), numbers.randint(70, 120)
        deal.learned[root] = prompt
        for _ in range(numbers.randint(1, 6)):
            deal.branch(root, prompt + numbers.choice([0, 0, numbers.randint(-30, 0)]), [numbers.randint(10, 60)])
    for _ in range(numbers.randint(0, 3)):
        deal.whole(numbers.randint(2, 60))
    how = {"ranks": ranks, "cost": CostModel(quadratic=0.001, linear=1.0), "token_cap": numbers.choice([300, 900])}
    deal.packs = assign_shared(deal.lengths, find_relatives(samples(deal, 0)), tokens=TOKENS, **how).packs
    return deal


def samples(deal: Deal, seed: int) -> list[dict[str, torch.Tensor]]:
    """A branch does not learn what it shares."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in deal.lengths]
    labels = [each.clone() for each in ids]
    for sample, (parent, tokens) in deal.shared.items():
        ids[sample][:tokens] = ids[parent][:tokens]
        labels[sample][:tokens] = IGNORED
    for sample, first in deal.learned.items():
        labels[sample][:first] = IGNORED
    return [{"input_ids": each, "labels": learned} for each, learned in zip(ids, labels, strict=True)]


def build() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config).train()
    enable_packing(model)
    return model


def checkpoint_layers(model: nn.Module, wanted: bool) -> None:
    """From the next forward on."""
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # renamed in transformers 5.23, not yet in 5.17
            model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = wanted


def sharded(backend: str, timeout_s: float, replicas: int = 1, *, reused: bool = False) -> nn.Module:
    """`reused`: all layers share one buffer, and are computed again."""
    mesh, ranks = None, dist.get_world_size()
    if replicas > 1:
        mesh = dist.init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(build(), mesh=mesh, backend=backend, timeout=timedelta(seconds=timeout_s))
    if reused:
        checkpoint_layers(model, wanted=True)
    enable_split(model, tokens=TOKENS, layers_in_flight=1 if reused else None)
    return model


def compute(model: nn.Module, deal: Deal, rank: int, seed: int) -> None:
    """One minibatch."""
    mine = MinibatchPacks.of(deal.packs[rank], SplitPlan.of(deal.packs, replicas=engine_of(model).grid.replicas))
    packs = pack_collate(PackedDataset(samples(deal, seed)).__getitems__(mine))
    with minibatch(model, tokens=count_target_tokens(packs), split=packs.split) as mb:
        for pack in packs:
            (summed_loss(model, pack) / mb.tokens).backward()


def compute_whole(model: nn.Module, deal: Deal, seed: int) -> dict[str, torch.Tensor]:
    """The gradients of the same samples by a model that is not sharded."""
    model.zero_grad()
    packs = pack_collate([[each] for each in samples(deal, seed)])
    tokens = count_target_tokens(packs)
    for pack in packs:
        (summed_loss(model, pack) / tokens).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# ------------------------------------------------------------------ processes


def _rank(
    connection: Connection,
    function: Callable[..., None],
    rank: int,
    ranks: int,
    environment: dict[str, str],
    hosts: Hosts | None,
    folder: str,
    args: tuple,
) -> None:
    die_with_parent()
    os.setsid()  # what it leaves running could be found
    os.environ.update(environment | {"TMPDIR": folder, "TRITON_INTERPRET": "1"})
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)})
    if hosts is not None:
        hosts.enter(rank * len(hosts.addresses) // ranks)
    tempfile.tempdir = folder
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rendezvous_url())
        function(rank, ranks, lambda *message: connection.send((rank, message)), *args)
    except Exception as error:
        connection.send((rank, ("error", f"{type(error).__name__}: {error}", getattr(error, "ranks", None))))
    connection.close()
    end_process(0)


class Job:
    """`function(rank, ranks, say, *args)` on `ranks` processes, forked from a server that has imported transformers;
    what a rank gives to `say` comes out of `messages`. To be used in a `with` block, after which `leftovers` looks for
    what has stayed.

    `hosts`: equally many ranks on each. Their store is on the first one, `in_rank_0` or beside it, as torchrun has it.
    """

    def __init__(
        self, function: Callable[..., None], ranks: int, *args: Any, hosts: Hosts | None = None, in_rank_0: bool = False
    ) -> None:
        self._function, self._ranks, self._args = function, ranks, args
        self._hosts, self._in_rank_0 = hosts, in_rank_0

    def __enter__(self) -> Job:
        self._shared = set(os.listdir("/dev/shm"))
        self._folder = tempfile.TemporaryDirectory()
        self._name = f"odc-store-{uuid.uuid4().hex}"
        environment = {NAME: self._name}
        if self._hosts is None:
            self._store = StoreServer(self._name)
        else:
            environment = {"MASTER_ADDR": self._hosts.addresses[0], "MASTER_PORT": str(_PORT)}
            environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "TORCHELASTIC_USE_AGENT_STORE": str(not self._in_rank_0)}
            if not self._in_rank_0:
                server = functools.partial(dist.TCPStore, self._hosts.addresses[0], _PORT, None, True)
                self._store = self._hosts.call(0, functools.partial(server, wait_for_workers=False))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["transformers.models.qwen2.modeling_qwen2", __name__])
        self.processes, self._connections = [], []
        for rank in range(self._ranks):
            receiver, sender = context.Pipe(duplex=False)
            given = (sender, self._function, rank, self._ranks, environment, self._hosts, self._folder.name, self._args)
            self.processes.append(context.Process(target=_rank, args=given))
            self.processes[-1].start()
            sender.close()
            self._connections.append(receiver)
        return self

    def messages(self, timeout_s: float) -> Iterator[tuple[int, tuple]]:
        """(rank, what it said), until all ranks have ended, or none has said a word for `timeout_s`."""
        while self._connections and (ready := wait(self._connections, timeout_s)):
            for connection in ready:
                try:
                    yield connection.recv()
                except EOFError:
                    self._connections.remove(connection)
        for process in self.processes if not self._connections else ():
            process.join(timeout_s)

    def __exit__(self, *_: object) -> None:
        self.running = [rank for rank, process in enumerate(self.processes) if process.is_alive()]  # had to be killed
        for process in self.processes:
            process.kill()
            process.join()
        if self._hosts is None:
            self._store.close()
        self._store = None
        self._kept = os.listdir(self._folder.name)
        self._folder.cleanup()

    def leftovers(self) -> list[str]:
        """Processes of the job, and with them what memory they map; temporary files; names in /dev/shm; sockets.

        The store's threads close those of killed ranks when they are next scheduled: they have 10 s.
        """
        pids = {process.pid for process in self.processes}
        found = [f"process {pid}" for pid, session in _sessions() if session in pids]
        found += [f"file {name}" for name in self._kept]
        new = set(os.listdir("/dev/shm")) - self._shared
        found += [f"/dev/shm/{name}" for name in new if any(str(pid) in name for pid in pids)]
        deadline_s = time.monotonic() + 10
        while (stays := self._name in Path("/proc/net/unix").read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        return found + [f"socket {self._name}"] * stays


def _sessions() -> Iterator[tuple[int, int]]:
    """(process, its session) of all processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            yield int(folder.name), int(fields[3])


def die(say: Callable[..., None]) -> None:
    """This rank's process is killed."""
    say("struck", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)
