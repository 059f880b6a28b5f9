"""Peak memory of a hybrid's microbatch: its modules run on tensors without data. No short formula has their rules."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...packs.chunks import compute_in_chunks
from ...plan.entries import Segment
from ...plan.segments import Read, SplitPlan
from ...recurrent.layers import separate_documents
from ...sequence.enable import set_sides, sides_of
from ...sequence.exchange import SequenceExchange
from ...sequence.fetched import SharedRows

_NAME = "odc_traced"  # of SDPA, without masks, as there are none of this name
_CHUNKS = 4  # of a rule's tokens, at least


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that operators have made here, and that are alive; of other shapes than `ignored`."""

    def __init__(self, ignored: Iterable[torch.Size] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known, self._ignored = set[int](), {tuple(sorted(shape)) for shape in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for each in tree_leaves(out):
            if not isinstance(each, torch.Tensor) or tuple(sorted(each.shape)) in self._ignored:
                continue
            if each.untyped_storage()._cdata not in given | self._known:
                self._count(each.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def freed() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, freed)


def _nothing(*_: Any, **__: Any) -> None:
    pass


class _MiddleExchange(SequenceExchange):
    """Of the middle one of three ranks, as if the others' rows were there, and nobody waited."""

    def __init__(self, shapes: list[Any], tokens: int) -> None:
        self.rank, self.in_order, self.tokens, self.split_cuts = 1, False, tokens, 1
        self.buffers: Any = SimpleNamespace(shapes=shapes)
        self.numbers = range(len(shapes))
        none: Any = SimpleNamespace(begin=_nothing, go_on=_nothing)
        self.sync = self.streams = none
        self._written = {}
        self.begin(SplitPlan.of([[[Segment(0, rank * tokens, (rank + 1) * tokens)]] for rank in range(3)]))

    def read(self, layer: int, spans: Any, run: Read, dtypes: Any, *, backward: bool = False) -> SharedRows:
        shape = self.buffers.shapes[layer]
        sizes = [(run.high - run.low, shape.heads, width) for width in shape.widths]
        return SharedRows(tuple(map(torch.empty, sizes)), dtypes, self.streams)

    def begin_adding(self, *of: Any) -> Any:
        return SimpleNamespace(add=_nothing, end=_nothing)

    def collect(self, layer: int, spans: Any, window: Any, gradients: Any) -> list[Any]:
        return [*gradients]

    start = publish = require_written = have_read = _nothing


def traced_bytes_per_token(config: Any, *, itemsize: int, checkpointing: bool, split: bool) -> int:
    """Bytes at the peak of a forward and backward of a pack, per token, of the decoder of a text config. `split`: of
    a segment between two others; with `checkpointing` then in chunks, of blocks alone, as the head is fused. In plain
    torch, as on a CPU: kernels of rules keep less.
    """
    return _traced(_Config(config.to_json_string(), config), itemsize, checkpointing, split)


@dataclass(frozen=True)
class _Config:
    """A key: equal configs have the same text."""

    text: str
    config: Any = field(compare=False)


@cache  # seconds, and advice compares plans that differ in other options
def _traced(of: _Config, itemsize: int, checkpointing: bool, split: bool) -> int:
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    AttentionInterface.register(_NAME, AttentionInterface()["sdpa"])
    config = copy.deepcopy(of.config)
    config._attn_implementation, config.tie_word_embeddings = _NAME, False
    chunk = next((n for at in ("chunk_size", "mamba_chunk_size") if (n := getattr(config, at, 0))), 64)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"), no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
        counts = _keep_one_of_a_kind(model.base_model)
        separate_documents(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            shapes = sides_of(model) if split else []
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            if not (head := not (split and checkpointing)):
                compute_in_chunks(model, chunk - 1)
            sizes = {size for parameter in model.parameters() for size in parameter.shape}
            tokens = next(each for each in count(_CHUNKS * chunk, chunk) if each not in sizes)
            return _peak(model, counts, shapes, tokens, head) // tokens


def _keep_one_of_a_kind(decoder: Any) -> list[int]:
    """Removes all but the last layer of each kind, where the peak is; returns how many it had of each."""
    kinds: dict[str, list[nn.Module]] = {}
    for layer in decoder.layers:
        kinds.setdefault(repr(layer), []).append(layer)
    last = sorted(kinds.values(), key=lambda layers: [*decoder.layers].index(layers[-1]))
    decoder.layers = nn.ModuleList(layers[-1] for layers in last)
    return [len(layers) for layers in last]


def _peak(model: Any, counts: list[int], shapes: list[Any], tokens: int, head: bool) -> int:
    """Bytes of a microbatch, with what the removed layers keep, without the gradients of parameters."""
    decoder, starts, ids = model.base_model, dict[nn.Module, int](), torch.zeros(1, tokens, dtype=torch.long)
    set_sides(shapes, _MiddleExchange([shape for _, shape in shapes], tokens))
    ends: Any = torch.zeros(3)  # of two documents, or of a segment
    ends._odc_bounds = (0, tokens // 2, tokens)
    documents = {"segments": [Segment(0, tokens, 2 * tokens)]} if shapes else {"cu_seq_lens_q": ends}
    given = {"input_ids": ids, "use_cache": False, **documents}
    live = LiveBytes(parameter.shape for parameter in model.parameters())

    def starts_first(module: nn.Module, _: Any) -> None:
        starts.setdefault(module, live.now)

    for each in (*decoder.children(), *decoder.layers):
        each.register_forward_pre_hook(starts_first)
    with live:
        loss = model(**given, labels=ids).loss if head else decoder(**given).last_hidden_state.square().sum()
        loss.backward()
    kept = {module: end - start for (module, start), (_, end) in pairwise(starts.items())}
    return live.most + sum((n - 1) * kept[layer] for n, layer in zip(counts, decoder.layers, strict=True))
