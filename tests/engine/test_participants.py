"""The hooks of a participant: their order, what they get, and what an error in each does on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from odc_triton import fully_shard, minibatch
from odc_triton.base.errors import DeadlineExceeded, OdcError, RanksDiffer
from odc_triton.engine.minibatch import Participant
from tests.support import ranks
from tests.support.refusals import caught


class Refused(OdcError):
    pass


class Probe(Participant):
    """Notes its hooks; raises in those of `fails`. `name` is an argument that `minibatch` has."""

    name = "split"

    def __init__(self, rank: int) -> None:
        self.rank, self.calls, self.fails = rank, [], {}
        self.message: Any = None  # instead of the usual ones

    def _call(self, hook: str, *given: Any) -> str:
        self.calls.append((hook, *given))
        if (error := self.fails.get(hook)) is not None:
            raise error
        return self.message or f"{hook} of {self.rank}"

    def entry(self, given: Any) -> Any:
        return self._call("entry", given)

    def entered(self, messages: list[Any]) -> None:
        self._call("entered", messages)

    def opened(self) -> None:
        self._call("opened")

    def leave(self) -> None:
        self._call("leave")

    def failed(self) -> None:
        self._call("failed")

    def exit(self) -> Any:
        return self._call("exit")

    def settle(self, messages: list[Any] | None) -> None:
        self._call("settle", messages)

    def reduced(self) -> None:
        self._call("reduced")


def _hooks(rank: int, world: int) -> dict[str, Any]:
    model = fully_shard(nn.Linear(2, 2, bias=False))
    probe = Probe(rank)
    model._odc_engine.register(probe)
    found: dict[str, Any] = {}

    def run(case: str, fails: dict[str, Exception]) -> None:
        probe.calls, probe.fails = [], fails
        model.zero_grad()
        text = ""
        try:
            with minibatch(model, tokens=1, split="a plan"):
                model(torch.ones(1, 2)).sum().backward()
        except OdcError as error:
            text = f"{type(error).__name__}: {error}"
        found[case] = (probe.calls, text, model.weight.grad is not None)

    one = rank == 1
    run("none", {})
    run("entry", {"entry": RuntimeError("not now")} if one else {})
    run("entered", {"entered": RanksDiffer("plans differ")})
    run("leave", {"leave": RuntimeError("segments are missing")} if one else {})
    run("settle", {"settle": Refused("it does not fit")})
    run("exit", {"exit": RuntimeError("no sums")} if one else {})
    probe.message = {1, 2} if one else None
    run("not JSON", {})
    probe.message = None
    run("again", {})
    return found


def test_hooks_and_their_errors() -> None:
    sent = {hook: [f"{hook} of {rank}" for rank in range(2)] for hook in ("entry", "exit")}
    entry, opened = [("entry", "a plan"), ("entered", sent["entry"])], [("opened",)]
    whole = [*entry, *opened, ("leave",), ("exit",), ("settle", sent["exit"])]
    for rank, found in enumerate(ranks.run(_hooks, 2)):
        assert found["none"] == found["again"] == ([*whole, ("reduced",)], "", True)
        calls, text, has_gradient = found["entry"]
        assert (calls, has_gradient) == (entry[:1], False)
        assert text.startswith("MinibatchFailed")
        assert "rank 1: RuntimeError: not now" in text
        assert found["entered"] == (entry, "RanksDiffer: plans differ", False)
        calls, text, has_gradient = found["leave"]
        failed = [("failed",)] if rank == 1 else []
        assert (calls, has_gradient) == ([*entry, *opened, ("leave",), *failed, ("exit",), ("settle", None)], False)
        assert "rank 1: RuntimeError: segments are missing" in text
        calls, text, has_gradient = found["exit"]
        assert (calls[-2:], has_gradient) == ([("exit",), ("settle", None)], False)
        assert "rank 1: RuntimeError: no sums" in text
        calls, text, has_gradient = found["not JSON"]
        assert (calls, has_gradient) == (entry[:1], False)
        assert "rank 1: TypeError: the message of 'split': Object of type set is not JSON serializable" in text
        assert found["settle"] == (whole, "Refused: it does not fit", False)


def test_a_rank_that_waited_in_vain_for_a_peer_in_leave_raises_that() -> None:
    model, probe = fully_shard(nn.Linear(2, 2)), Probe(0)
    model._odc_engine.register(probe)
    probe.fails["leave"] = DeadlineExceeded([1], "the lock of rank 1")
    with pytest.raises(DeadlineExceeded, match="the lock of rank 1"), minibatch(model, tokens=1):
        pass
    assert model._odc_engine.is_broken


def test_a_device_that_is_late_after_an_error_ends_the_job() -> None:
    """It may still add: to the sums of the next minibatch."""
    model, probe = fully_shard(nn.Linear(2, 2)), Probe(0)
    model._odc_engine.register(probe)
    probe.fails["exit"] = DeadlineExceeded([], "the device was still busy")
    with pytest.raises(DeadlineExceeded, match="still busy") as caught, minibatch(model, tokens=1):
        raise ValueError("of a microbatch")
    assert "of a microbatch" in str(caught.value.__context__)
    assert model._odc_engine.is_broken


def test_two_of_one_name_and_one_in_a_minibatch_are_refused() -> None:
    engine = fully_shard(nn.Linear(2, 2))._odc_engine
    engine.register(Probe(0))
    with pytest.raises(ValueError, match="a participant of the name 'split' already"):
        engine.register(Probe(0))
    model = fully_shard(nn.Linear(2, 2))
    with minibatch(model), pytest.raises(RuntimeError, match="can't be registered inside a minibatch"):
        model._odc_engine.register(Probe(0))


def _late(rank: int, world: int) -> dict[str, Any]:
    """What is known only inside of the minibatch."""
    model = fully_shard(nn.Linear(2, 2, bias=False))
    probe = Probe(rank)
    model._odc_engine.register(probe)
    found: dict[str, Any] = {}

    def gradient(number: float | None, **given: int) -> Any:
        try:
            with minibatch(model, **given) as mb:
                for _ in range(rank + 1):
                    model(torch.ones(1, 2)).sum().backward()
                if number is not None:
                    mb.divide_by(number)
            return model.weight.grad.full_tensor()[0, 0].item()
        except (OdcError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            model.zero_grad()

    found["by ranks"], found["by tokens"] = gradient(None), gradient(None, tokens=1)
    found["by 12"], found["by 12, tokens"] = gradient(12.0), gradient(12.0, tokens=1)
    found["then by ranks"] = gradient(None)
    found["by others"] = gradient(2.0 + rank)
    found["by 0"] = gradient(0.0)
    with minibatch(model) as ended:
        pass
    found["too late"] = caught(lambda: ended.divide_by(2.0))
    model._odc_engine.divide_factor = 5.0
    found["by a factor"], found["by 12, a factor"] = gradient(None), gradient(12.0)
    probe.calls = []
    with minibatch(model, tokens=1):
        model._odc_engine.give(split="a plan")
    found["hooks"] = [each for each in probe.calls if each[0] in ("entry", "opened")]
    with minibatch(model, tokens=1):
        found["unknown"] = caught(lambda: model._odc_engine.give(videos="a plan"))
    return found


def test_what_is_known_late() -> None:
    """The three microbatches of two ranks give 3."""
    for found in ranks.run(_late, 2):
        assert found["by ranks"] == found["then by ranks"] == 1.5
        assert found["by tokens"] == 3.0
        assert found["by 12"] == found["by 12, tokens"] == found["by 12, a factor"] == 0.25
        assert found["by a factor"] == pytest.approx(0.6)
        assert found["by others"] == (
            "RanksDiffer: by rank, gradients were to be divided by [2.0, 3.0]: call divide_by alike on all ranks"
        )
        assert found["by 0"].startswith("MinibatchFailed: ")
        assert "divide_by has 0.0; give a finite number above 0" in found["by 0"]
        assert found["too late"].startswith("RuntimeError: divide_by outside of its minibatch")
        assert found["hooks"] == [("entry", None), ("opened",), ("entry", "a plan"), ("opened",)]
        assert found["unknown"].startswith("RuntimeError: this minibatch was given a videos")
