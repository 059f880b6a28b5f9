"""`enable_split`: a sharded model computes segments of sequences, whose ranks read each other's keys and values."""

from __future__ import annotations

import contextlib
import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ..base.errors import PeerFailed, RanksDiffer, describe
from ..base.untyped import untyped
from ..engine.api import engine_of
from ..engine.module import plain_class
from ..nn.modes import evaluating
from ..plan.entries import Segment
from ..plan.segments import SplitPlan
from .attention import Pair
from .buffers import CUTS, IN_FLIGHT, KVBuffers, LayerShape
from .exchange import SequenceExchange
from .layer import AttentionHook, LayerSplit, RecurrentHook, RecurrentSplit
from .sync import HostSync, KernelSync


def enable_split(model: nn.Module, tokens: int, *, cuts: int = CUTS, layers_in_flight: int | None = None) -> None:
    """Lets minibatches split sequences over ranks: `minibatch(model, plan=packs)`. Collective.

        enable_packing(model); fully_shard(model); enable_split(model, tokens=26_000)

    With replicas a sample is split over the ranks of one: `MinibatchSampler(replicas=…)`. A forward of one token finds
    out which layers attend, and how wide.

    model: what `fully_shard` returned, after `enable_packing`.
    tokens: of each rank, the most tokens of one minibatch whose keys and values others may read; their memory is
        allocated now. `MinibatchSampler(split=tokens)` keeps within it, and its `split_tokens` is what to give where it
        was made with `split=True`.
    cuts: of each rank, the most tokens of one minibatch after which others go on, for models with recurrent layers:
        each takes a state of every such layer that has a buffer. `MinibatchSampler(split_cuts=cuts)` keeps within it.
    layers_in_flight: how many layers have buffers at the same time. By default 2, where each layer is checkpointed by
        itself or nothing is trained; else all layers. If one checkpoint of yours covers several layers, give at least
        that number.

    Raises TypeError for a model that is not sharded, ValueError for numbers below 1, NotImplementedError for what can't
    be split (attention that is not `enable_packing`'s or gets no `segments`), RanksDiffer if arguments differ.
    """
    engine = engine_of(model, "enable_split")
    tokens = at_least_1("tokens", tokens, "the tokens per rank that others may read")
    cuts = at_least_1("cuts", cuts, "the tokens per rank after which others go on")
    in_flight = layers_in_flight
    if in_flight is not None:
        in_flight = at_least_1("layers_in_flight", in_flight, "the number of layers that have buffers")
    if engine.participant(SequenceExchange) is not None:
        raise ValueError("enable_split was called on this model before")
    layers = sides_of(model)
    shapes = [shape for _, shape in layers]
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if in_flight is None:
        few = not trains or _are_checkpointed(model, layers)
        in_flight = IN_FLIGHT if few else len(layers)
    message: dict[str, Any] = {"tokens": tokens, "cuts": cuts, "layers_in_flight": in_flight}
    message["layers"] = [asdict(shape) | {"widths": [*shape.widths]} for shape in shapes]
    everyones = engine.exchange("enable_split", {**message, "token": uuid.uuid4().hex})
    for rank, theirs in enumerate(everyones):
        for name, value in message.items():
            if theirs[name] != value:
                raise RanksDiffer(
                    f"enable_split: {name} is {value} on rank {engine.rank} and {theirs[name]} on rank {rank}"
                )
    token = f"{everyones[0]['token']}-split-{engine.grid.replica}"
    sizes = {"tokens": tokens, "cuts": cuts, "in_flight": in_flight, "gradients": trains}
    buffers = KVBuffers(engine.heap, shapes, **sizes, token=token, timeout_s=engine.barrier.timeout_s)
    by = KernelSync if engine.transport.adds_by_kernel else HostSync
    sync, streams = by(buffers, engine), engine.streams.first.another()
    numbers = [untyped(module).layer_idx for module, _ in layers]
    how = {"grid": engine.grid, "in_order": engine.deterministic, "numbers": numbers}
    exchange = SequenceExchange(sync, streams, **how)
    engine.register(exchange)
    engine.streams.also(streams)
    engine.streams.watch(sync)
    set_sides(layers, exchange)


def at_least_1(name: str, given: Any, what: str) -> int:
    """An integer, from Python or numpy. Raises ValueError for others, and numbers below 1."""
    try:
        number = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} is {given!r}; give {what}, 1 or more")
    return number


def set_sides(layers: Sequence[tuple[nn.Module, LayerShape]], exchange: SequenceExchange) -> None:
    """Lets the modules find the exchange."""
    for number, (module, shape) in enumerate(layers):
        side, both = LayerSplit(exchange, number), vars(module).get("_odc_split")
        if shape.rows_per_cut:
            side = RecurrentSplit(both.rows, side) if isinstance(both, RecurrentSplit) else RecurrentSplit(side, None)
        untyped(module)._odc_split = side


@contextlib.contextmanager
def split_forward(model: nn.Module, split: SplitPlan | None) -> Iterator[None]:
    """Forwards of packs with segments outside of a minibatch, without gradients: to evaluate, for log-probabilities.

        with torch.no_grad(), split_forward(model, packs.split):
            losses = [summed_loss(model, pack) for pack in packs]

    Collective: every rank enters, with the same plan, and runs its packs in their order.

    model: what `enable_split` was called on.
    split: the packs' plan; None where no pack has segments.

    Raises PeerFailed if another rank raised, and as `minibatch` does.
    """
    engine = engine_of(model, "split_forward")
    if engine.is_open:
        raise RuntimeError("split_forward inside a minibatch: run these forwards before or after it")
    if torch.is_grad_enabled():
        raise RuntimeError("split_forward is for forwards without gradients: put it into `with torch.no_grad()`")
    exchange = engine.participant(SequenceExchange)
    refusal: Exception | None = None
    digest = None
    try:
        if exchange is not None:
            digest = exchange.entry(split)
        else:
            engine.refuse_unknown({SequenceExchange.name: split})
        engine.drain("what a former minibatch has left")
    except Exception as error:  # raised below, once the other ranks know it
        refusal = error
    message = {"split": digest, "refusal": None if refusal is None else describe(refusal)}
    messages = engine.exchange("enter split_forward", message)
    if refusal is not None:
        raise refusal
    for rank, theirs in enumerate(messages):
        if theirs["refusal"] is not None:
            raise PeerFailed([rank], f"rank {rank} can't enter split_forward: {theirs['refusal']}")
    if exchange is None:
        yield
        return
    exchange.entered([theirs["split"] for theirs in messages])
    exchange.opened(forward_only=True)
    failed = True
    try:
        yield
        exchange.leave()
        engine.drain("forwards on segments of samples")
        failed = False
    finally:
        if failed:
            exchange.failed()
        exchange.end(failed=failed)


def _are_checkpointed(model: nn.Module, layers: Sequence[tuple[nn.Module, LayerShape]]) -> bool:
    """True if each of these modules is the only one of its shapes in a layer that activation checkpointing computes
    again.
    """
    alone, shapes = set(), dict[nn.Module, list[LayerShape]]()
    for module, shape in layers:
        shapes.setdefault(module, []).append(shape)
    for layer in model.modules():
        by_transformers = hasattr(layer, "_gradient_checkpointing_func") and getattr(
            layer, "gradient_checkpointing", False
        )
        if by_transformers or hasattr(layer, "_checkpoint_wrapped_module"):  # torch's wrapper
            inside = [module for module in layer.modules() if module in shapes]
            met = [shape for module in inside for shape in shapes[module]]
            alone.update(inside if len(set(met)) == len(met) else ())
    return alone == set(shapes)


class _Recorder(AttentionHook, RecurrentHook):
    """Records the modules that attend, or recur, in a forward, in their order."""

    def __init__(self) -> None:
        self.seen: list[tuple[nn.Module, LayerShape]] = []

    def on_attention(
        self, module: nn.Module, keys: torch.Tensor, values: torch.Tensor, segments: Sequence[Segment | None] | None
    ) -> None:
        if segments is None:
            raise NotImplementedError(
                f"{type(module).__name__} is not told which documents are segments of samples, as its model passes on "
                f"neither segments nor the position_ids that it was given: train it on unsplit samples"
            )
        if any(each is module for each, _ in self.seen):
            raise NotImplementedError(f"{type(module).__name__} attends twice in one forward, which can't be split")
        self._add(module, keys.dtype, heads=keys.shape[1], widths=(keys.shape[-1], values.shape[-1]))

    def on_rows(self, module: nn.Module, inputs: torch.Tensor, rows: int) -> None:
        if rows < 1:
            raise NotImplementedError(
                f"{type(module).__name__} has a convolution of kernel size 1, which can't be split"
            )
        self._add(module, inputs.dtype, heads=1, widths=(inputs.shape[1],), rows_per_cut=rows)

    def on_states(self, module: nn.Module, step: Callable[[], Pair]) -> None:
        a, b = step()
        widths = a.shape[2] * a.shape[3], b.shape[2] * b.shape[3]
        self._add(module, b.dtype, heads=b.shape[1], widths=widths, rows_per_cut=1, states=True)

    def _add(self, module: nn.Module, dtype: torch.dtype, **sizes: Any) -> None:
        self.seen.append((module, LayerShape(dtype=str(dtype).removeprefix("torch."), **sizes)))


def sides_of(model: nn.Module) -> list[tuple[nn.Module, LayerShape]]:
    """The modules that call `packed_attention`, in their order, and the shapes of their keys and values; a recurrent
    layer twice, of its convolution and of its states.
    """
    recorder = _Recorder()
    modules = [each for each in model.modules() if isinstance(getattr(each, "layer_idx", None), int)]
    device = next(model.parameters()).device
    inputs: dict[str, Any] = {
        "input_ids": torch.zeros(1, 1, dtype=torch.long, device=device),  # one token can't be two documents
        "position_ids": torch.zeros(1, 1, dtype=torch.long, device=device),
        "segments": [None],
        "use_cache": False,
    }
    for module in modules:
        untyped(module)._odc_split = recorder
    try:
        # Autocast's dtypes fit into the model's. A graph of this forward would be of no use.
        eagerly = torch.compiler.set_stance("force_eager")
        with evaluating(model), torch.no_grad(), torch.autocast(device.type, enabled=False), eagerly:
            model(**inputs)
    finally:
        for module in modules:
            del module._odc_split
    if not recorder.seen:
        raise NotImplementedError(
            f"no layer of {plain_class(model).__name__} attends by odc_triton's packed attention: call "
            f"odc_triton.hf.enable_packing(model) before fully_shard"
        )
    return recorder.seen
