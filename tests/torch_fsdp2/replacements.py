"""What is replaced in torch's FSDP2 tests: device, backend, names that moved, and a minibatch around each step.

No assertion, tolerance or expected value: lines of assertions are left as they are, and `adapt` fails if one changed.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

# Regular expression, replacement: applied to each line, in this order.
TABLE = [
    # device
    (r'torch\.device\("cuda"(, [\w.]+(\(\))?)?\)', 'torch.device("cpu")'),
    (r'"cuda(:0)?"', '"cpu"'),
    (r"\.cuda\(\)", ".cpu()"),
    (r"\btorch\.cuda\.", "cuda."),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
    # backend: gloo has no average
    (r"dist\.all_reduce\(([\w.]+), op=dist\.ReduceOp\.AVG\)", r"all_reduce_average(\1)"),
    # names: moved between torch 2.6 and 2.13, or of what is tested
    (r"^    test_compiled_fsdp,$", ""),
    (r"from torch\.distributed\._composable\.fsdp(\.fully_shard)? import .*", "globals().update(NAMES)"),
    (r"\btorch\.distributed\.fsdp\.fully_shard\b", "fully_shard"),
]
NAMES = "globals().update(NAMES)"  # after the last import: names.py has the names
# A minibatch synchronises gradients once, at its end: docs/fsdp2_bridge.md says to leave these calls out.
BRIDGE = [
    (r"^( *)(\w+\.set_requires_gradient_sync\(.*\))$", r"\1pass  # \2"),
    (r"^( *)(events: List\[EventType\] = \[\])$", r"\1ready(model); \2"),  # use_odc before FSDP2's calls are recorded
]
READY = (r"^( *fully_shard\w*\((\w*model\w*)[,)].*)$", r"\1; ready(\2)")  # in functions without a step
_ASSERTS = re.compile("assert|Equal|Close")


def adapt(text: str, way: str) -> str:
    """The text to run: `way` is torch, ours or bridge. Raises ValueError if a replacement touched an assertion."""
    tree, lines = ast.parse(text), text.splitlines()
    kept = {number for node in _assertions(tree) for number in _lines(node)}
    before, after, stepping = _minibatches(tree)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    after[imports[-1].end_lineno].append(NAMES)
    adapted = []
    for number, line in enumerate(lines, start=1):
        if number not in kept and not _ASSERTS.search(line):
            rows = TABLE + BRIDGE * (way == "bridge") + [READY] * (number not in stepping)
            for pattern, replacement in rows:
                line = re.sub(pattern, replacement, line)
        adapted += [*before[number], line, *after[number]]
    check(text, result := "\n".join(adapted) + "\n")
    return result


def check(text: str, adapted: str) -> None:
    """Raises ValueError if a line of an assertion differs, or an assertion of several lines does."""
    for old, new in zip([*_asserting(text), None], [*_asserting(adapted), None], strict=False):
        if old != new:
            raise ValueError(f"a replacement changed the assertion {old!r} to {new!r}: correct the table")


def _asserting(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if _ASSERTS.search(line)]
    return lines + [ast.unparse(node) for node in _assertions(ast.parse(text))]


def _assertions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        called = getattr(node, "func", None)
        name = getattr(called, "attr", getattr(called, "id", ""))
        if isinstance(node, ast.Assert) or name.startswith(("assert", "check_")):
            yield node


def _minibatches(tree: ast.Module) -> tuple[dict[int, list[str]], dict[int, list[str]], set[int]]:
    """Lines to insert before and after lines, and the lines of functions that have a step.

    `begin(model)` comes before a step's forward, `end(model)` after its backward. A loop over microbatches is a step.
    """
    before, after, stepping = defaultdict(list), defaultdict(list), set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        statements = sorted((n for n in ast.walk(function) if isinstance(n, ast.stmt)), key=lambda n: n.lineno)[1:]
        for first, last, models in filter(None, (_step(each, statements) for each in statements)):
            before[first.lineno].append(f"{' ' * first.col_offset}begin({', '.join(sorted(models))})")
            after[last.end_lineno].append(f"{' ' * last.col_offset}end({', '.join(sorted(models))})")
            stepping.update(_lines(function))
    return before, after, stepping


def _step(statement: ast.stmt, statements: list[ast.stmt]) -> tuple[ast.stmt, ast.stmt, set[str]] | None:
    """The first and last statement of the step whose backward `statement` is, and the models that it runs."""
    called = getattr(getattr(statement, "value", None), "func", None)
    if getattr(called, "attr", "") != "backward":
        return None
    first, models, wanted = statement, _models(called.value), _names(called.value)
    for earlier in reversed(statements[: statements.index(statement)]):
        if not models and (made := _made(earlier) & wanted):
            first, models, wanted = earlier, _models(earlier), (wanted - made) | _names(earlier.value)
    for loop in (each for each in statements if isinstance(each, ast.For) and statement.lineno in _lines(each)):
        if "microbatch" in ast.unparse(loop) and ".step(" not in ast.unparse(loop):
            inner = [each for each in ast.walk(loop) if isinstance(each, ast.For) and _names(each.target) & models]
            return loop, loop, models.union(*(_names(each.iter) for each in inner)) - {"_model"}
    return (first, statement, models) if models else None


def _made(statement: ast.stmt) -> set[str]:
    """The names that a statement assigns or appends to."""
    if isinstance(statement, ast.Assign):
        return set().union(*map(_names, statement.targets))
    called = getattr(getattr(statement, "value", None), "func", None)
    return _names(called.value) if getattr(called, "attr", "") == "append" else set()


def _models(node: ast.AST) -> set[str]:
    """The models that are called in an expression: `model(x)`, `model[0](x)`."""
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return {each.id for each in (getattr(each, "value", each) for each in called) if "model" in getattr(each, "id", "")}


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _lines(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)
