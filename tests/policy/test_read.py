"""A policy that other processes read: names and values, one version a read, and who is turned away."""

from __future__ import annotations

import itertools
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from odc_triton import PolicyUnavailable, full_parameters, fully_shard, minibatch, offer_policy, publish, read_policy
from odc_triton.checkpoint import load_pretrained_shards
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from odc_triton.engine.publication import Publication
from odc_triton.policy.offer import PolicyOffer, _Contents, _file, _OfferServer
from odc_triton.policy.reader import _FREE_READS, PolicyReader
from tests.support import ranks, slow
from tests.support.deadlines import LONG_S, until
from tests.support.families import causal_lm, with_lora
from tests.support.models import build


class _Plain(nn.Module):
    """Not transformers': an odd number of rows, a scalar, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 5) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("computed", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x).sum() for layer in self.layers) * self.scale


def _sharded(kind: str, backend: str) -> nn.Module:
    if kind == "plain":
        return fully_shard(_Plain(), backend=backend)
    if kind == "blocks":  # each has a heap of its own
        model = build("qwen2")
        for layer in model.model.layers:
            fully_shard(layer, backend=backend)
        return fully_shard(model, backend=backend)
    if kind == "bfloat16":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return fully_shard(build("qwen2"), backend=backend, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model = with_lora(causal_lm("Qwen3")) if kind == "lora" else causal_lm(kind)
    return fully_shard(model, backend=backend)


def _reads(rank: int, world: int, kind: str, backend: str) -> None:
    from odc_triton.checkpoint.pretrained_tensors import PretrainedTensors

    model = _sharded(kind, backend)
    offer = offer_policy(model)
    reader = read_policy(offer.address)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        with minibatch(model):
            if kind == "plain":
                model(torch.randn(2, 3)).backward()
            else:
                ids = torch.randint(3, 60, (1, 7))
                model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        buffers = {"steps": torch.tensor(7)} if kind == "plain" else {}
        wanted = dict(full_parameters(model)) | buffers if kind == "plain" else dict(PretrainedTensors(model))
        found = dict(reader)
        assert list(found) == list(wanted)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert reader.version == model._odc_engine.publication.number
        _reads_adapter(reader, model, kind)
        model._odc_engine.exchange("read", {})
    assert reader.dtypes == {"bfloat16" if kind == "bfloat16" else "float32"} | ({"int64"} if buffers else set())
    assert (reader.config or {}).get("vocab_size") == (None if kind == "plain" else model.config.vocab_size)
    model._odc_engine.exchange("read all", {})


def _reads_adapter(reader: PolicyReader, model: nn.Module, kind: str) -> None:
    """Plain PEFT makes the policy of the base and what is read."""
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    if kind != "lora":
        with pytest.raises(PolicyUnavailable, match="can't be read as an adapter: it has none"):
            reader.adapter()
        return
    config, tensors = reader.adapter()
    plain = get_peft_model(causal_lm("Qwen3"), LoraConfig(**config))
    assert not set_peft_model_state_dict(plain, tensors).unexpected_keys
    wanted = {name: value for name, value in full_parameters(model) if "lora_" in name}
    assert len(wanted) == len(tensors) == 12
    assert all(torch.equal(plain.get_parameter(name), value) for name, value in wanted.items())


@pytest.mark.parametrize(
    ("kind", "world", "backend"),
    [
        ("plain", 3, "cpu-sharded"),
        slow("blocks", 2, "cpu"),
        ("bfloat16", 2, "cpu"),
        ("Qwen3Moe", 2, "cpu-sharded"),  # its files have each expert apart
        ("lora", 2, "cpu"),
    ],
)
def test_names_and_values_are_those_of_the_files(kind: str, world: int, backend: str) -> None:
    ranks.run(_reads, world, kind, backend)


def _reads_before_its_step(rank: int, world: int) -> None:
    model = fully_shard(_Plain())
    model.unshard()  # the offer is of the shards, not of these tensors
    offer = offer_policy(model)
    model.reshard()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader, patient = read_policy(offer.address), read_policy(offer.address, timeout=10 * LONG_S)
    engine = model._odc_engine
    dict(reader)  # before any step
    with minibatch(model):
        model(torch.randn(2, 3)).backward()
    if rank == 0:
        optimizer.step()
    engine.exchange("rank 0 has stepped", {})
    if rank == 1:
        with pytest.raises(PolicyUnavailable, match="rank 1 reads its own job's before its own step: step first"):
            dict(patient)
        thread = threading.Timer(0.1, optimizer.step)
        thread.start()  # some train in a thread, and read in the first
        assert [*dict(reader)] == [*dict(full_parameters(model)), "steps"]
        thread.join()
    engine.exchange("both have", {})
    torch.testing.assert_close(dict(reader), dict(full_parameters(model)) | {"steps": torch.tensor(7)}, rtol=0, atol=0)
    engine.exchange("read", {})


def test_a_rank_does_not_wait_for_itself() -> None:
    ranks.run(_reads_before_its_step, 2)


class _Policy:
    """A model of one rank, that can be stepped while it is read: all weights are minus the number of steps."""

    def __init__(self, max_lag: float = LONG_S) -> None:
        self.model = fully_shard(nn.Linear(4, 4))
        with torch.no_grad():
            for each in self.model.parameters():
                each.zero_()
        publish(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.offer: PolicyOffer = offer_policy(self.model, max_lag=max_lag)
        self.reader: PolicyReader = read_policy(self.offer.address)

    def step(self) -> None:
        with minibatch(self.model):
            sum(each.sum() for each in self.model(torch.eye(4)[:1])).backward()
        for each in self.model.parameters():
            each.grad.to_local().fill_(1.0)
        self.optimizer.step()


@pytest.fixture
def policy() -> Iterator[_Policy]:
    made = _Policy()
    yield made
    made.reader.close()
    made.offer.close()


def _values(tensors: Iterator[tuple[str, torch.Tensor]], between: object = None) -> set[float]:
    """All values; `between` is called after the first tensor."""
    found = set(next(tensors)[1].flatten().tolist())
    if between is not None:
        between()
    return found.union(*(value.flatten().tolist() for _, value in tensors))


def test_a_step_that_has_begun_is_waited_for(policy: _Policy) -> None:
    """Its owner writes where it is read: the numbers are looked at before the read too."""
    policy.step()
    policy.model._odc_engine.publication.announce()
    read: list[set[float]] = []
    thread = threading.Thread(target=lambda: read.append(policy.reader.read(_values)))
    thread.start()
    thread.join(0.2)
    assert not read
    with torch.no_grad():
        for each in policy.model.parameters():
            each.to_local().fill_(7.0)
    policy.model._odc_engine.publish()
    thread.join(LONG_S)
    assert read == [{7.0}]


def test_after_four_reads_the_publication_is_pinned(policy: _Policy) -> None:
    steps: list[threading.Thread] = []
    seen: list[tuple[int, bool]] = []

    def step_meanwhile() -> None:
        steps.append(threading.Thread(target=policy.step))
        steps[-1].start()
        if len(steps) <= 4:
            steps[-1].join(LONG_S)  # not held back
        else:
            steps[-1].join(0.3)
        seen.append((policy.model._odc_engine.publication.number, steps[-1].is_alive()))

    first = policy.model._odc_engine.publication.number
    assert policy.reader.read(lambda tensors: _values(tensors, step_meanwhile)) == {-4.0}
    assert seen[4] == (first + 4, True), "the fifth step waits for the reader"
    steps[-1].join(LONG_S)
    assert policy.model._odc_engine.publication.number == first + 5
    assert policy.reader.read(_values) == {-5.0}


def test_a_reader_that_takes_longer_than_max_lag_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    policy = _Policy(max_lag=0.2)
    with pytest.raises(PolicyUnavailable, match="dropped this reader, which held it back for its max_lag"):
        policy.reader.read(lambda tensors: _values(tensors, policy.step))
    (record,) = [each for each in caplog.records if "held the policy back" in each.message]
    assert f"reader {os.getpid()} held" in record.message
    other = read_policy(policy.offer.address)
    assert len(other.read(_values)) == 1
    policy.offer.close()


def test_a_reader_that_is_dropped_while_it_pins(policy: _Policy) -> None:
    reads = itertools.count(1)

    def take(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        policy.step()
        if next(reads) == _FREE_READS:  # it pins next, and hears the end where the answer would be
            policy.reader._connection.shutdown(socket.SHUT_RD)

    with pytest.raises(PolicyUnavailable, match="no longer offers its policy"):
        policy.reader.read(take)


def test_loading_is_announced_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They write where the policy is read."""
    saved = build("qwen2", seed=1)
    saved.save_pretrained(tmp_path / "pretrained")
    optimizer = torch.optim.SGD(fully_shard(saved).parameters())
    write_checkpoint(tmp_path / "checkpoint", model=saved, optimizer=optimizer, state={}, step=1)
    state = saved.state_dict()
    announce = Publication.announce
    loads: list[Callable[[nn.Module], Any]] = [
        lambda model: model.load_state_dict(state),
        lambda model: load_checkpoint(tmp_path / "checkpoint", model=model, optimizer=None),
        lambda model: load_pretrained_shards(model, tmp_path / "pretrained"),
    ]
    for load in loads:
        model, seen = fully_shard(build("qwen2")), []
        before = dict(full_parameters(model))

        def look(self: Publication, model: nn.Module = model, seen: list = seen) -> None:
            if not seen:
                seen.append(dict(full_parameters(model)))
            announce(self)

        with monkeypatch.context() as patch:
            patch.setattr(Publication, "announce", look)
            load(model)
        after = dict(full_parameters(model))
        torch.testing.assert_close(seen[0], before, rtol=0, atol=0)
        assert not any(torch.equal(after[name], value) for name, value in before.items() if value.dim() > 1)


def test_addresses_that_offer_nothing(policy: _Policy) -> None:
    for address in ("@odc-policy-none", "", "x" * 200):
        with pytest.raises(PolicyUnavailable, match=f"no policy can be read at {address} "):
            read_policy(address)
    reader = read_policy(policy.offer.address)
    policy.offer.close()
    with pytest.raises(PolicyUnavailable, match=r"no longer offers its policy at .*: it ended"):
        reader.read(_values)
    with pytest.raises(PolicyUnavailable, match="no policy can be read at"):
        read_policy(policy.offer.address)


def test_an_offer_ends_also_in_forked_processes(policy: _Policy) -> None:
    server = policy.offer._server
    assert server is not None
    kept = [each.dup() for each in (server._listener, *server._readers)]  # as a data loader's worker has them
    policy.offer.close()
    with pytest.raises(PolicyUnavailable, match="it ended"):
        policy.reader.read(_values)
    with pytest.raises(PolicyUnavailable, match="refused"):
        read_policy(policy.offer.address, timeout=0.2)
    for each in kept:
        each.close()


def test_a_reader_ends_also_in_forked_processes(policy: _Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, server = read_policy(policy.offer.address), policy.offer._server
    assert server is not None
    with policy.reader._connection.dup() as kept, reader._connection.dup() as ended:  # as a data loader's worker has
        for each, end in ((policy.reader, kept), (reader, ended)):
            each._pin()
            end.setblocking(False)
        with monkeypatch.context() as child:
            child.setattr(policy.reader, "_pid", 0)
            policy.reader.close()
        reader.close()
        with pytest.raises(BlockingIOError):
            kept.recv(1)
        assert ended.recv(1) == b""
        until(lambda: len(server._pins) == 1)


def test_a_forked_process_ends_no_offer(policy: _Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as child:
        child.setattr(policy.model._odc_engine, "_pid", 0)
        with pytest.raises(RuntimeError, match=r"PolicyOffer\.close in process \d+, forked from rank 0"):
            policy.offer.close()
    policy.step()
    assert policy.reader.read(_values) == {-1.0}


def test_a_job_that_stands_still_is_not_waited_for(policy: _Policy) -> None:
    reader = read_policy(policy.offer.address, timeout=0.2)
    policy.model._odc_engine.publication.announce()
    with pytest.raises(PolicyUnavailable, match=r"have published \[2\] times.* within 0 s: does the job stand still"):
        reader.read(_values)


def test_a_rank_that_does_not_answer_is_not_held_back(policy: _Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, answers, answer = read_policy(policy.offer.address, timeout=0.2), threading.Event(), _OfferServer._answer

    def answer_late(self: _OfferServer, connection: socket.socket) -> bool:
        answers.wait(LONG_S)
        return answer(self, connection)

    monkeypatch.setattr(_OfferServer, "_answer", answer_late)
    with pytest.raises(PolicyUnavailable, match=r"the rank that offers .* does not answer: is it stopped"):
        reader.read(lambda tensors: _values(tensors, policy.step))
    answers.set()
    start_s = time.monotonic()
    policy.step()
    assert time.monotonic() - start_s < LONG_S / 2
    with pytest.raises(PolicyUnavailable, match="no longer offers"):
        reader.read(_values)


def _as_another_user(address: str) -> tuple[str, list[int]]:
    """The error of a reader of another user, and the file descriptors that it receives."""
    os.setuid(65534)
    with pytest.raises(PolicyUnavailable) as refused:
        read_policy(address)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{address[1:]}")
        _, fds, _, _ = socket.recv_fds(connection, 1, 9)
    return str(refused.value), fds


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_are_refused(policy: _Policy) -> None:
    said, fds = ranks.in_own_process(_as_another_user, policy.offer.address)
    assert "is offered by user 0, not by this one" in said
    assert fds == []


def test_memory_is_mapped_read_only(policy: _Policy) -> None:
    connection, fds = policy.reader._connect()
    connection.close()
    assert len(fds) == 3  # what is where; tensors that are in no heap, of which there are none; the heap
    for fd in (fds[0], fds[2]):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 1)
    for fd in fds:
        os.close(fd)


def test_what_can_not_be_offered() -> None:
    with pytest.raises(TypeError, match="Linear is not sharded"):
        offer_policy(nn.Linear(2, 2))
    model = fully_shard(nn.Linear(2, 2))
    for max_lag in (-1.0, 1800, float("nan")):
        with pytest.raises(ValueError, match=r"max_lag is .*: give seconds, at least 0 and less than 1800, "):
            offer_policy(model, max_lag=max_lag)
    model._odc_engine.heap.device = torch.device("cuda")
    with pytest.raises(NotImplementedError, match=r"the model is on cuda, .* sample with the model"):
        offer_policy(model)


def test_why_rank_0_offers_nothing_is_said_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, said = fully_shard(nn.Linear(2, 2)), []
    engine = model._odc_engine
    exchange = engine.exchange
    monkeypatch.setattr(engine, "exchange", lambda purpose, message: said.append(message) or exchange(purpose, message))

    def files(self: object) -> list[int]:
        raise RuntimeError("no values for weight")

    monkeypatch.setattr(_Contents, "files", files)
    with pytest.raises(RuntimeError, match="no values for weight"):
        offer_policy(model)
    assert said[1]["problem"] == "no values for weight"


def _offers_nothing(rank: int, world: int, error: Exception) -> tuple[type, str]:
    with mock.patch.object(_Contents, "files", side_effect=error), pytest.raises(RuntimeError) as refused:
        offer_policy(fully_shard(nn.Linear(2, 2)))
    return refused.type, str(refused.value)


@pytest.mark.parametrize(
    ("error", "wanted"), [(OSError("no space"), RuntimeError), (NotImplementedError("is merged"), NotImplementedError)]
)
def test_all_ranks_raise_the_same_where_rank_0_offers_nothing(error: Exception, wanted: type) -> None:
    """So that a loop which samples otherwise where a policy can't be offered does so on all."""
    assert ranks.run(_offers_nothing, 2, error) == [(wanted, str(error))] * 2


def test_a_tensor_that_is_not_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux writes 2 GiB at most."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, bytes(data[:100]), offset))
    contents = [bytes(range(250)), b"", b"the next"]
    fd = _file(contents)
    assert os.pread(fd, 1000, 0) == contents[0].ljust(256, b"\0") + contents[2]
    os.close(fd)


def _pins(address: str, ready: Any) -> None:
    """Holds the next publication back, until the process is killed or dropped."""
    reader = read_policy(address)
    try:
        reader._pin()
        ready.send("pinned")
        time.sleep(LONG_S)
    finally:
        reader.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reader_that_died_or_stopped_holds_nothing_back(number: signal.Signals) -> None:
    policy = _Policy(max_lag=LONG_S if number is signal.SIGKILL else 0.3)
    ours, theirs = ranks.fork_server().Pipe(duplex=False)
    process = ranks.fork_server().Process(target=_pins, args=(policy.offer.address, theirs))
    process.start()
    assert ours.recv() == "pinned"
    os.kill(process.pid, number)
    start_s = time.monotonic()
    policy.step()
    assert time.monotonic() - start_s < LONG_S / 2
    until(lambda: policy.model._odc_engine.publication.pinned.seen() == [0])
    process.kill()
    process.join()
    policy.offer.close()


def _begins_a_step(address: Any) -> None:
    policy = _Policy()
    policy.model._odc_engine.publication.announce()
    address.send(policy.offer.address)
    time.sleep(LONG_S)


def test_a_job_that_died_is_named_at_once() -> None:
    ours, theirs = ranks.fork_server().Pipe(duplex=False)
    process = ranks.fork_server().Process(target=_begins_a_step, args=(theirs,))
    process.start()
    reader = read_policy(ours.recv(), timeout=LONG_S)
    killer = threading.Timer(0.1, process.kill)
    killer.start()
    with pytest.raises(PolicyUnavailable, match="it ended"):
        reader.read(_values)
    process.join()


def _changes_adapters(rank: int, world: int) -> None:
    model = fully_shard(with_lora(causal_lm("Qwen3")))
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)
    offer = offer_policy(model)

    def read() -> dict[str, torch.Tensor]:
        found = dict(read_policy(offer.address))
        model._odc_engine.exchange("read", {})
        return found

    def step() -> None:
        ids = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(0))
        with minibatch(model):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    for change in (model.disable_adapter_layers, lambda: [each.scale_layer(2.0) for each in _lora_layers(model)]):
        before = {name: value.clone() for name, value in full_parameters(model)}
        with model.disable_adapter():  # for a while, as of a reference
            pass
        change()
        for publishes in (optimizer.step, lambda: publish(model)):
            with pytest.raises(RuntimeError, match="adapters are active, merged, disabled or scaled otherwise than"):
                publishes()
        assert all(torch.equal(value, before[name]) for name, value in full_parameters(model))
        model.enable_adapter_layers()
        _ = [each.unscale_layer() for each in _lora_layers(model)]
        step()
        name = next(name for name, _ in full_parameters(model) if "lora_B" in name)
        assert not torch.equal(dict(full_parameters(model))[name], before[name])
    was = read()
    _ = [each.scale_layer(2.0) for each in _lora_layers(model)]
    offer.close()
    publish(model)
    offer = offer_policy(model)
    now = read()
    assert any(not torch.equal(was[name], now[name]) for name in was)
    offer.close()


def _lora_layers(model: nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [each for each in model.modules() if isinstance(each, LoraLayer)]


def test_adapters_that_change_are_named() -> None:
    ranks.run(_changes_adapters, 2)


def _reads_without_base(rank: int, world: int) -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit

    base = causal_lm("Qwen3").requires_grad_(False)
    for name in [name for name, each in base.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"]:
        packed = Linear4bit(*base.get_submodule(name).weight.T.shape, bias=False)
        packed.weight = Params4bit(base.get_submodule(name).weight.data, requires_grad=False)
        base.set_submodule(name, packed.to("cpu"))
    model = fully_shard(with_lora(base))
    offer = offer_policy(model)
    reader = read_policy(offer.address)
    wanted = {name.replace(".default", ""): value for name, value in full_parameters(model) if "lora_" in name}
    torch.testing.assert_close(reader.adapter()[1], wanted, rtol=0, atol=0)
    with pytest.raises(PolicyUnavailable, match=r"only its adapter can be read: reader\.adapter"):
        dict(reader)
    model._odc_engine.exchange("read", {})


@pytest.mark.slow  # of bitsandbytes' import
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_base_that_other_processes_cant_read() -> None:
    ranks.run(_reads_without_base, 2)
