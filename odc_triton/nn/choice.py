"""The implementation of each operator: a table by operator, shape, tokens and device type, and overrides. Pure.

A choice is written as words joined by slashes, all optional: `triton/staged/fused`, `eager`, `direct`.
For some operators only: `linear=triton/direct,embedding=eager`. An argument overrides the environment variable
ODC_OPERATORS, which overrides the table.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace
from typing import Any

VARIABLE = "ODC_OPERATORS"
AUTO = "auto"

BACKENDS = ("eager", "triton")
SOURCES = ("gathered", "direct", "staged")
WGRADS = ("whole", "fused")

# For two roles of `replace_layers` the operator has another name.
_ALIASES = {"head": "log_probs", "attention": "qkv"}

# The words of each operator. It ignores words of other operators.
WORDS = {
    "linear": {*BACKENDS, *SOURCES, *WGRADS},
    "qkv": {*BACKENDS, "gathered", "direct", *WGRADS},
    "embedding": {*BACKENDS, "gathered", "direct", *WGRADS},
    "log_probs": {*BACKENDS, "direct", "fused"},
    "experts": {*BACKENDS, *SOURCES, *WGRADS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The implementation of one operator.

    backend: "eager", plain torch, or "triton", our kernels.
    source: of the weights: "gathered", the unit's whole tensors, by the library's product; "direct",
        their owners, during the computation; "staged", a local copy that is filled meanwhile.
    wgrad: "whole": the library computes the whole weight gradient, which is then added to the owners; "fused": each
        owner's part is added as soon as it is computed; the whole never exists.
    tiles: (kernel, tile) pairs that override the tiles in `odc_kernels.tiles`.
    """

    backend: str
    source: str
    wgrad: str
    tiles: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> str:
        return f"{self.backend}/{self.source}/{self.wgrad}"

    @property
    def is_gathered(self) -> bool:
        """True if the weight is read from its unit's whole tensors, so must be among them."""
        return self.source == "gathered"

    @property
    def is_by_kernel(self) -> bool:
        return self.backend == "triton"

    @property
    def reads_copies(self) -> bool:
        """True if it reads copies of parts of a weight, or addresses, which may be a copy's."""
        return self.source == "staged" or self.is_by_kernel

    def tile(self, kernel: str) -> Any:
        """The tile chosen for this kernel, None for its default."""
        return next((tile for name, tile in self.tiles if name == kernel), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the table: its conditions, None for any, and the choice. `tokens`: at most this many."""

    operator: str
    device_type: str | None = None
    shape: tuple[int, ...] | None = None
    tokens: int | None = None
    choice: Choice

    def holds(self, operator: str, shape: tuple[int, ...], device_type: str) -> bool:
        mine = self.device_type in (None, device_type) and self.shape in (None, tuple(shape))
        return self.operator == operator and mine


def as_choice(words: str) -> Choice:
    """The choice written as "backend/source/wgrad"."""
    backend, source, wgrad = words.split("/")
    return Choice(backend=backend, source=source, wgrad=wgrad)


def _entry(operator: str, device_type: str | None, words: str) -> Entry:
    return Entry(operator=operator, device_type=device_type, choice=as_choice(words))


# The first matching line counts. On CUDA no fused product has been compared with the library's: gathered and whole
# are plain ODC as in the paper. An embedding reads few of many rows and the head is never whole: always direct. So are
# experts on a CPU, where a rank reads views.
TABLE = (
    _entry("linear", None, "eager/gathered/whole"),
    _entry("qkv", None, "eager/gathered/whole"),
    _entry("embedding", "cuda", "triton/direct/fused"),
    _entry("embedding", None, "eager/direct/fused"),
    _entry("log_probs", "cuda", "triton/direct/fused"),
    _entry("log_probs", None, "eager/direct/fused"),
    _entry("experts", "cuda", "eager/gathered/whole"),
    _entry("experts", None, "eager/direct/fused"),
)


def parse(text: str) -> dict[str, tuple[str, ...]]:
    """The words for each operator. Raises ValueError for an unknown word or operator, and for a repeated one."""
    if not isinstance(text, str):
        raise ValueError(f"choice is {text!r}; give words such as 'triton/direct', or {AUTO!r}")
    found: dict[str, tuple[str, ...]] = {}
    seen: set[str] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        operator, equals, words = item.rpartition("=")
        names = [_ALIASES.get(operator.strip(), operator.strip())] if equals else list(WORDS)
        if names[0] not in WORDS:
            raise ValueError(
                f"{item!r}: there is no operator {operator!r}; there are {', '.join(WORDS)}, as in 'linear=eager'"
            )
        given = tuple(word.strip() for word in words.split("/"))
        for kind in (BACKENDS, SOURCES, WGRADS):
            if len(set(given) & set(kind)) > 1:
                raise ValueError(f"{item!r}: of {', '.join(kind)} give one")
        for word in given:
            if word != AUTO and word not in WORDS[names[0]] and (equals or word not in WORDS["linear"]):
                allowed = [each for each in (*BACKENDS, *SOURCES, *WGRADS) if each in WORDS[names[0]]]
                raise ValueError(f"{item!r}: {word!r} is not known here; give {AUTO!r} or some of {', '.join(allowed)}")
        if equals and names[0] in seen:
            raise ValueError(f"{text!r} gives {names[0]} twice")
        seen.update(names if equals else ())
        for name in names:
            found[name] = (*found.get(name, ()), *(word for word in given if word in WORDS[name]))
    return found


def _with(choice: Choice, words: tuple[str, ...]) -> Choice:
    for word in words:
        field = "backend" if word in BACKENDS else "source" if word in SOURCES else "wgrad"
        choice = replace(choice, **{field: word})
    return choice


def _words(operator: str, environment: str, given: str) -> tuple[str, ...]:
    try:
        variable = parse(environment)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    return *variable.get(operator, ()), *parse(given).get(operator, ())


_words_cached = functools.lru_cache(maxsize=4096)(_words)


def _look_up(
    operator: str,
    shape: tuple[int, ...],
    tokens: int | None,
    device_type: str,
    words: tuple[str, ...],
    table: tuple[Entry, ...],
) -> list[Choice]:
    """The choices of all lines that some number of tokens can reach; with `tokens`, only of lines for that many."""
    holding = []
    for entry in table or TABLE:
        if entry.holds(operator, tuple(shape), device_type):
            holding.append(entry)
            if entry.tokens is None:
                break
    fitting = [each for each in holding if tokens is None or each.tokens is None or tokens <= each.tokens]
    found = [_with(entry.choice, words) for entry in fitting]
    if not found:
        raise LookupError(f"the table has no line for {operator} of {shape} on {device_type}, {tokens} tokens")
    if found[0].backend == "triton" and device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"{operator} was given {'/'.join(words)}, but on a CPU kernels run only in Triton's interpreter, slowly: "
            f"set TRITON_INTERPRET=1 before triton is imported, or give 'eager'"
        )
    return found


@functools.lru_cache(maxsize=65536)
def _in_the_table(
    operator: str, shape: tuple[int, ...], tokens: int, device_type: str, environment: str, given: str
) -> Choice:
    return _look_up(operator, shape, tokens, device_type, _words(operator, environment, given), TABLE)[0]


def choose(
    operator: str,
    *,
    shape: tuple[int, ...],
    tokens: int,
    device_type: str,
    given: str = AUTO,
    table: tuple[Entry, ...] = TABLE,
) -> Choice:
    """The implementation of `operator` for a weight of this shape and this many tokens, on a "cpu" or "cuda" device.

    given: see this file's first lines. Raises ValueError if it, or the environment variable, is invalid, and
    if it chooses Triton's kernels on a CPU without the interpreter.
    """
    environment = os.environ.get(VARIABLE, "")
    if not table or table is TABLE:
        return _in_the_table(operator, tuple(shape), tokens, device_type, environment, given)
    return _look_up(operator, shape, tokens, device_type, _words_cached(operator, environment, given), table)[0]


def choices(
    operator: str, *, shape: tuple[int, ...], device_type: str, given: str = AUTO, table: tuple[Entry, ...] = TABLE
) -> list[Choice]:
    """What `choose` may return for some number of tokens. `torch.compile` traces it, so nothing is cached."""
    words = _words(operator, os.environ.get(VARIABLE, ""), given)
    return _look_up(operator, shape, None, device_type, words, table)
