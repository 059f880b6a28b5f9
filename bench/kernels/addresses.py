"""Finds 32-bit products in a kernel's addresses, in its TTIR.

A row's index times a row's length exceeds 2^31 before either does, so that product must be computed in 64 bits. From
each offset of a pointer, and each size, stride and coordinate of a descriptor, the walk goes back to its operands; a
32-bit product of two values that are not constants is a fault. The walk ends at quotients and remainders: what is
divided counts tiles, and a grid has fewer than 2^31 of them anyway. In a flat copy, where a block's index times its
size is an element's index, a 32-bit product with a constant is a fault too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
_RESULT = re.compile(r"(%[\w$.-]+)(?::(\d+))? = ")
_LOCATION = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)$")
_ENDS = ("arith.divsi", "arith.divui", "arith.remsi", "arith.remui", "arith.cmpi", "tt.load", "tt.atomic_rmw")


@dataclass(eq=False, slots=True)
class _Value:
    """The value of a name: the operation that computes it, its type as text, and what it is made of."""

    text: str
    operation: str = "argument"
    type: str = ""
    made_of: list[_Value] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Region:
    """The names of a region. What it yields becomes, one by one, part of `results` and of `carried`."""

    names: dict[str, _Value] = field(default_factory=dict)
    results: list[_Value] = field(default_factory=list)
    carried: list[_Value] = field(default_factory=list)


def faults_of_offsets(ttir: str, *, flat: bool = False) -> list[str]:
    """The 32-bit products of two variables that addresses in a kernel's TTIR are computed from, one per line.

    Calls, and early returns that carry values, are not followed: they are faults as well.
    `flat`: the kernel addresses elements by one number; products of one variable are faults too.
    """
    found = {}
    for value in _walk(_roots(ttir)):
        narrow = re.search(r"(?:^|x)i(?:8|16|32)>?$", value.type)
        variables = [factor for factor in value.made_of if not _constant(factor)]
        if value.operation == "arith.muli" and narrow and len(variables) > (0 if flat else 1):
            found[f"32-bit address arithmetic: {value.text}"] = None
    if unfollowed := re.search(r"\btt\.call\b|\bcf\.\w+ .*\^bb\d+\(", ttir):
        found[f"addresses are not followed through {unfollowed.group().split(' ')[0]}"] = None
    return list(found)


def _constant(value: _Value) -> bool:
    if value.operation in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        return _constant(value.made_of[0])
    return value.operation == "arith.constant"


def _walk(roots: Iterable[_Value]) -> Iterable[_Value]:
    seen, open_values = set(), list(roots)
    while open_values:
        value = open_values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if value.operation not in _ENDS:
            open_values += value.made_of


def _roots(ttir: str) -> list[_Value]:
    """Offsets of pointers, coordinates, sizes and strides of descriptors.

    Names are unique only within a region and those around it.
    """
    roots: list[_Value] = []
    regions = [_Region()]

    def value_of(name: str) -> _Value:
        for region in reversed(regions):
            if name in region.names:
                return region.names[name]
        return _Value(name)

    def define(name: str, value: _Value) -> _Value:
        return regions[-1].names.setdefault(name, value)

    for written in ttir.splitlines():
        line = _LOCATION.sub("", written.strip())
        if line.startswith("}"):
            closed = regions.pop()
            if not line.endswith("{"):
                continue
            # The other half of an `if` yields the same. What a `while` carries on counts as its result too.
            regions.append(_Region(results=closed.results, carried=closed.carried))
            continue
        result, operation = _RESULT.match(line), _operation(line)
        if operation == "block":  # ^bb0(%a: i32, ...): after a `while`'s condition, the values it passed on
            names = re.findall(r"(%[\w$.-]+):", line)
            passed = regions[-1].results
            for index, name in enumerate(names):
                define(name, passed[index] if index < len(passed) else _Value(name))
            continue
        head, _, kind = line.rpartition(" : ") if " : " in line else (line, "", "")
        body = head[result.end() :] if result else head
        used = [value_of(name) for name in _NAME.findall(body)]
        if operation == "tt.addptr":
            roots.append(used[1])
        elif "descriptor" in operation:
            roots += [value_of(name) for numbers in re.findall(r"\[(.*?)\]", body) for name in _NAME.findall(numbers)]
        elif operation == "scf.yield":
            for targets in (regions[-1].results, regions[-1].carried):
                for target, value in zip(targets, used, strict=False):
                    target.made_of.append(value)
            continue
        elif operation == "scf.condition":
            for target, value in zip(regions[-1].results, used[1:], strict=False):
                target.made_of.append(value)
            continue
        results = []
        if result:
            count = int(result.group(2) or 1)
            names = [f"{result.group(1)}#{i}" for i in range(count)] if result.group(2) else [result.group(1)]
            # A loop or an `if` returns what its regions yield; anything else is made of its operands.
            parts = [] if operation in ("scf.for", "scf.while", "scf.if") else used
            results = [define(name, _Value(line, operation, kind, list(parts))) for name in names]
        if line.endswith("{"):
            regions.append(_Region(results=results))
            if operation in ("scf.for", "scf.while"):
                _enter(regions[-1], body, operation, value_of)
    return roots


def _operation(line: str) -> str:
    if line.startswith("^"):
        return "block"
    found = re.match(r"(?:%\S+ = )?\"?([\w.]+)", line)
    return found.group(1) if found else ""


def _enter(region: _Region, body: str, operation: str, value_of: Callable[[str], _Value]) -> None:
    """Names what a loop counts and carries: its counter comes from its bounds, the rest from outside and its yields."""
    if operation == "scf.for":
        counter, bounds = re.match(r"scf\.for (\S+) = (.*?)(?: iter_args|  :|$)", body).groups()
        region.names[counter] = _Value(body, operation, "", [value_of(name) for name in _NAME.findall(bounds)])
    for name, first in re.findall(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)", body.partition("(")[2]):
        value = _Value(body, operation, "", [value_of(first)])
        region.names[name] = value
        region.carried.append(value)
    if operation == "scf.for":
        # A loop that never runs returns its initial values.
        for result, value in zip(region.results, region.carried, strict=True):
            result.made_of.append(value)
