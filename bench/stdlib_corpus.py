"""An instruction data set that every machine with Python already has: its standard library.

A record asks for the body of a function or class, given its signature and docstring. Together the two fields
are the definition's source, split after the docstring's last line, so nothing appears twice:

    prompt      decorators, signature, docstring
    completion  the rest of the body

Module-level functions, classes, and methods become records if they have a docstring and more of a body. A
class's completion includes its methods, which are also separate records: hence the long tail of lengths.
Functions inside functions are not: they mean little without what they close over, and the outer completion
already has them.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idlelib", "lib2to3", "site-packages", "test", "tests", "turtledemo"}
)
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_SIZES += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")


def build_corpus(root: str | os.PathLike | None = None) -> tuple[list[dict[str, str]], int]:
    """Records {"prompt", "completion"} from the Python files under `root`, and the number of these.

    `root` is the running Python's standard library if not given. Files are parsed, never imported or run. The
    order is that of the sorted paths and of the lines in each file; of equal records the first one stays.

    Raises ValueError if `root` holds no definition to learn from.
    """
    root = Path(sysconfig.get_path("stdlib") if root is None else root)
    files = skipped = 0
    unique: dict[tuple[str, str], None] = {}
    for path in _python_files(root):
        files += 1
        try:
            unique.update(dict.fromkeys(_split_definitions(path)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            # ValueError: a NUL byte, or bytes that the encoding lacks. The last two: nested too deeply.
            skipped += 1
    if not unique:
        raise ValueError(
            f"{root} has {files} Python files ({skipped} unreadable) and no documented function or class in "
            "them. Where the standard library is zipped or stripped, pass the folder of other Python sources."
        )
    return [{"prompt": prompt, "completion": completion} for prompt, completion in unique], files


def qwen2(*sizes: int) -> dict[str, Any]:
    """A config's fields of a Qwen2, from the values of `_SIZES`."""
    return dict(zip(_SIZES, sizes, strict=True))


def write_text(folder: Path, records: list[dict[str, str]], config: dict[str, Any]) -> Any:
    """Writes data.jsonl, tokenizer.json and config.json into `folder`, as `train sft` needs. Returns the tokenizer.

    It is trained on the records, with `config["vocab_size"]` words.
    """
    from odc_triton.jobs.data.tokenizer import train_tokenizer

    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    texts = (record["prompt"] + record["completion"] for record in records)
    tokenizer = train_tokenizer(texts, vocab_size=config["vocab_size"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"} | config))
    return tokenizer


def _python_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _split_definitions(path: Path) -> Iterator[tuple[str, str]]:
    """(prompt, completion) of each documented definition of one file, in the order of its lines."""
    with tokenize.open(path) as file:  # follows the file's coding line
        text = file.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as invalid escapes in the file
        tree = ast.parse(text)
    lines = [line + "\n" for line in text.split("\n")]  # str.splitlines would also split at form feeds
    for node in _definitions(tree):
        if not ast.get_docstring(node):
            continue
        start = min(part.lineno for part in (node, *node.decorator_list)) - 1
        cut, end = node.body[0].end_lineno, node.end_lineno
        indent = lines[start][: len(lines[start]) - len(lines[start].lstrip(" \t"))]
        # Not textwrap.dedent: one line at column 0, inside a string, would keep it from doing anything.
        dedented = [line.removeprefix(indent) for line in lines[start:end]]
        prompt, completion = "".join(dedented[: cut - start]), "".join(dedented[cut - start :])
        if completion.strip():
            yield prompt, completion


def _definitions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            pending.extend(reversed(list(ast.iter_child_nodes(node))))
