"""Recurrences of transformers' layers: a document's run from a state, and what a segment needs whose state is not
known.

All of them are affine in the state S that comes in: out = local + reads S, and S becomes A S + B. So a segment computes
`local`, `reads` and (A, B) before it knows S, by one call of the layer's own function for the delta rules, whose state
has a column for each column of the values:

    rule([v | 0], from [0 | I]) = [local | reads],  and its last state is [B | A]

Of Mamba-2 A is a number per head, and `reads` are C times the decay since the segment's first token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .packages import Documents, Function, Kernel, delta_rule, scan


class Affine(NamedTuple):
    """S becomes A S + B: [1, heads, k, k], or [1, heads, 1, 1] for a number, and [1, heads, k, v]."""

    a: Tensor
    b: Tensor


class Rule(ABC):
    """One call of a layer's recurrence on a pack's rows, [1, T, heads, width]. A state is [1, heads, k, v]."""

    inputs: tuple[Tensor, ...]
    keys: int  # k
    terms: tuple[Tensor, ...]  # all that may need gradients

    def __init__(self, function: Function, inputs: Sequence[Tensor], keys: int, options: dict[str, Any]) -> None:
        self.inputs, self.keys = tuple(inputs), keys
        self.terms = (*inputs, *(each for each in options.values() if isinstance(each, Tensor)))
        self._function, self._options = function.on(inputs[0].device), options
        self._kernel = function.kernel if inputs[0].is_cuda else None

    def run_all(
        self, bounds: Sequence[tuple[int, int]], states: Sequence[Tensor | None], *, final: bool
    ) -> Iterable[tuple[Tensor, Tensor | None]]:
        """Of these rows of documents: what comes out, and, where `final`, the states after them. `states`: before them,
        None for zeros.
        """
        if self._kernel is None:
            return [self.run(*rows, state) for rows, state in zip(bounds, states, strict=True)]
        given, (first, *_), (*_, end) = None, *zip(*bounds, strict=True)
        if (some := next((state for state in states if state is not None), None)) is not None:
            given = torch.cat([some.new_zeros(some.shape) if state is None else state for state in states])
        if [end for _, end in bounds[:-1]] == [first for first, _ in bounds[1:]]:
            rows = [each[:, first:end] for each in self.inputs]
        else:
            rows = [torch.cat([each[:, low:high] for low, high in bounds], dim=1) for each in self.inputs]
        documents = Documents.of([high - low for low, high in bounds], self.inputs[0].device)
        out, last = self._by_kernel(self._kernel, rows, documents, given, final=final)
        states = [None] * len(bounds) if last is None else last.split(1)
        return zip(out.split(documents.lengths(), 1), states, strict=True)

    @abstractmethod
    def _by_kernel(
        self, kernel: Kernel, rows: Sequence[Tensor], documents: Documents, states: Tensor | None, *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One call of a package, on `rows` of `documents`."""

    @abstractmethod
    def run(self, first: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of these rows: what comes out, and the state after them."""

    @abstractmethod
    def affine(self, first: int, end: int, before: Affine | None) -> tuple[Tensor, Tensor, Affine]:
        """`local` [1, end - first, heads, v], `reads` [1, end - first, heads, k], and what becomes of the state that
        comes in. `before`: what became of it up to these rows.
        """

    @staticmethod
    @abstractmethod
    def after(state: Tensor, step: Affine) -> Tensor:
        """The state after a step."""

    @abstractmethod
    def known(self, state: Tensor) -> Affine:
        """To this state, from any."""

    def of_rows(self, rows: Sequence[Tensor]) -> Affine:
        """A step of what was published, [1, heads, 1, elements] each."""
        a, b = rows
        width = math.isqrt(a.shape[-1])
        return Affine(a.unflatten(-1, (width, width))[:, :, 0], b.unflatten(-1, (self.keys, -1))[:, :, 0])


def add_reads(local: Tensor, reads: Tensor, state: Tensor) -> Tensor:
    """What comes out of a segment that began with `state`."""
    return local + torch.einsum("bthk,bhkv->bthv", reads.to(state.dtype), state).to(local.dtype)


class DeltaRule(Rule):
    """GatedDeltaNet and KDA: S becomes (I - beta k k^T) diag(exp g) S + beta k v^T."""

    def __init__(self, function: Function, inputs: Sequence[Tensor], options: dict[str, Any]) -> None:
        """`inputs`: query, key, value, g and beta."""
        super().__init__(function, inputs, inputs[1].shape[-1], options)

    def _by_kernel(
        self, kernel: Kernel, rows: Sequence[Tensor], documents: Documents, states: Tensor | None, *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        return delta_rule(kernel, *rows, documents=documents, states=states, final=final, **self._options)

    def run(self, first: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._call([each[:, first:end] for each in self.inputs], state)

    def _call(self, rows: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = rows
        return self._function(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **self._options)

    def affine(self, first: int, end: int, before: Affine | None) -> tuple[Tensor, Tensor, Affine]:
        q, k, v, g, beta = (each[:, first:end] for each in self.inputs)
        heads, width, keys = v.shape[2], v.shape[3], k.shape[3]
        if before is None:
            eye = torch.eye(keys, dtype=torch.float32, device=v.device)
            before = Affine(eye.expand(1, heads, keys, keys), eye.new_zeros(1, heads, keys, width))
        more = torch.cat([v, v.new_zeros(*v.shape[:3], keys)], dim=-1)
        out, last = self._call([q, k, more, g, beta], torch.cat([before.b, before.a], dim=-1))
        return out[..., :width], out[..., width:], Affine(last[..., width:], last[..., :width])

    @staticmethod
    def after(state: Tensor, step: Affine) -> Tensor:
        return step.a @ state + step.b

    def known(self, state: Tensor) -> Affine:
        return Affine(state.new_zeros(*state.shape[:2], self.keys, self.keys), state)


class Scan(Rule):
    """Mamba-2: S becomes exp(dt a) S + dt B x^T; here S is [1, heads, state size, head width]."""

    def __init__(
        self, function: Function, inputs: Sequence[Tensor], a: Tensor, chunk_size: int, options: dict[str, Any]
    ) -> None:
        """`inputs`: x, dt, B and C."""
        super().__init__(function, inputs, inputs[2].shape[-1], options | {"chunk_size": chunk_size})
        self._a, self.terms = a, (*self.terms, a)

    def _by_kernel(
        self, kernel: Kernel, rows: Sequence[Tensor], documents: Documents, states: Tensor | None, *, final: bool
    ) -> tuple[Tensor, Tensor | None]:
        (x, dt, b, c), before = rows, None if states is None else states.transpose(2, 3)
        out, last = scan(kernel, x, dt, self._a, b, c, documents=documents, states=before, final=final, **self._options)
        return out, None if last is None else last.transpose(2, 3)

    def run(self, first: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, dt, b, c = (each[:, first:end] for each in self.inputs)
        given = {"initial_states": None if state is None else state.transpose(2, 3), "return_final_states": True}
        out, last = self._function(x, dt, self._a, b, c, **given, **self._options)
        return out, last.transpose(2, 3)

    def affine(self, first: int, end: int, before: Affine | None) -> tuple[Tensor, Tensor, Affine]:
        local, b = self.run(first, end, None if before is None else before.b)
        _, dt, _, c = (each[:, first:end] for each in self.inputs)
        if (bias := self._options.get("dt_bias")) is not None:
            dt = dt + bias.to(dt.dtype)
        dt = F.softplus(dt) if self._options.get("dt_softplus") else dt
        dt = dt.clamp(*self._options.get("dt_limit", (0.0, float("inf"))))
        decay = (self._a.to(torch.float32) * dt.to(torch.float32)).cumsum(1).exp()[..., None]  # [1, T, heads, 1]
        if before is not None:
            decay = decay * before.a.transpose(1, 2)
        heads = decay.shape[2]
        reads = c.to(torch.float32).repeat_interleave(heads // c.shape[2], dim=2) * decay
        return local, reads, Affine(decay[:, -1:].transpose(1, 2), b)

    @staticmethod
    def after(state: Tensor, step: Affine) -> Tensor:
        return step.a * state + step.b

    def known(self, state: Tensor) -> Affine:
        return Affine(state.new_zeros(*state.shape[:2], 1, 1), state)
