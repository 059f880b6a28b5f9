"""How far features reach into the package, and which files a call passes: run it before and after a change.

    python -m bench.house              # of this checkout
    python bench/house.py              # in the root of another one, with its packages importable

A file knows a feature if it imports from the feature's home, or uses an identifier that belongs to it. The files that a
call passes are traced on one rank.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path.cwd()
PACKAGE = ROOT / "odc_triton"


class Feature(NamedTuple):
    """`home`: patterns of its files below the package; `words`: what its identifiers match."""

    home: tuple[str, ...]
    words: str


FEATURES = {
    "scalars": Feature((), r"is_scalar|whole_shape"),
    "exact sums": Feature(
        ("engine/exact*.py", "checkpoint/repeat.py"),
        r"(?i:exact|\w*_exact|exact_?\w+)|MinibatchToRepeat|repeat(ed|ing)",
    ),
    "split sequences": Feature(
        ("sequence/*", "plan/pieces.py", "plan/split.py"),
        r"enable_split|split_(tokens|sequences|across_hosts|forward|bytes)|SplitPlan|(No)?Pieces?|blocked_on",
    ),
    "shared prefixes": Feature(
        ("plan/relatives.py", "plan/shared.py", "plan/line.py", "sequence/tree.py", "sequence/flash.py"),
        r"\w*shares?_prefix\w*|[Rr]elatives|AttentionOfTree",
    ),
    "images": Feature(
        (
            *("packs/pictures.py", "packs/images.py", "plan/tower.py", "jobs/train/vision.py"),
            "jobs/trainers/picture_records.py",
            *(f"jobs/data/{name}.py" for name in ("pictures", "shown", "parts", "vision")),
        ),
        r"(?i:\w*(pictures|picture_|vision|tower)\w*)|PictureProcessor|images|image_blocks",
    ),
    "replicas": Feature(("comm/replicas.py", "comm/peers.py"), r"(?i:\w*replicas?(_\w+)?)|PeerStatus"),
    "bridge to FSDP2": Feature(("fsdp2/*",), r"Bridged\w*|use_odc"),
    "Muon": Feature(("optim/*",), r"(?i:\w*muon\w*)"),
    "background checkpoints": Feature(("jobs/checkpoints/background.py",), r"(?i:\w*background\w*)|is_dropped"),
    "hyperparameters": Feature(("engine/steps.py",), r"(?i:hyperparameters)"),
}


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, (ast.arg, ast.keyword)) and node.arg:
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.alias)):
            yield node.name


def imported(tree: ast.AST, path: str) -> Iterator[str]:
    """The package's files, without their suffix, that a file imports from."""
    folder = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            base = "/".join(part for part in above if part)
            yield base
            yield from (f"{base}/{alias.name}" for alias in node.names)


def exports(tree: ast.Module) -> int:
    """The number of public names that a file defines."""
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    names += [target.id for target in targets if isinstance(target, ast.Name)]
    return sum(not name.startswith("_") for name in names)


def reach(feature: Feature, trees: dict[str, ast.Module]) -> tuple[int, list[str]]:
    """(public names of its home, other files that know it)."""
    home = {path for path in trees if any(fnmatch(path, pattern) for pattern in feature.home)}
    stems = {path.removesuffix(".py").removesuffix("/__init__") for path in home}
    word = re.compile(feature.words)
    knows = [
        path
        for path, tree in trees.items()
        if path not in home
        and (stems & set(imported(tree, path)) or any(word.fullmatch(name) for name in identifiers(tree)))
    ]
    return sum(exports(trees[path]) for path in home), knows


class Trace:
    """The package's files above base/ whose functions run inside of the block, in order."""

    def __enter__(self) -> list[str]:
        self.files: list[str] = []
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self.files

    def _called(self, frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(PACKAGE)):
            path = str(Path(name).relative_to(PACKAGE))
            if path not in self.files and not frame.f_code.co_name.startswith("<") and not path.startswith("base/"):
                self.files.append(path)

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def ways() -> dict[str, list[str]]:
    """The files that a call of each kind passes, on one rank."""
    import torch
    from torch import nn

    import odc_triton as odc

    odc.fully_shard(nn.Linear(1, 1))  # imports what is imported at the first call
    gc.collect()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)))
    found: dict[str, list[str]] = {}
    with Trace() as found["fully_shard"]:
        odc.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        block = odc.minibatch(model, tokens=1)
        with Trace() as found["entry"]:
            block.__enter__()
        with Trace() as found["forward"]:
            loss = model(torch.ones(1, 8)).sum()
        leaf = model._odc_engine.parameters[0].leaf
        hooks = leaf._post_accumulate_grad_hooks
        key, hook = next(iter(hooks.items()))
        hooks[key] = _traced(hook, found)
        loss.backward()
        hooks[key] = hook
        with Trace() as found["exit"]:
            block.__exit__(None, None, None)
        with Trace() as found["step"]:
            optimizer.step()
    return found


def _traced(hook: Callable, found: dict[str, list[str]]) -> Callable:
    def traced(leaf: Any) -> None:
        with Trace() as found["gradient, from leaf to owner"]:
            hook(leaf)

    return traced


def main() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    trees = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in paths}
    print("| feature | public names of its home | other files that know it |\n| --- | --: | --: |")
    known = {name: reach(feature, trees) for name, feature in FEATURES.items()}
    for name, (names, files) in known.items():
        print(f"| {name} | {names} | {len(files)} |")
    if "--files" in sys.argv:
        for name, (_, files) in known.items():
            print(f"\n{name}: {', '.join(files)}")
    print("\n| way | files |\n| --- | --- |")
    for name, files in ways().items():
        print(f"| {name} | {len(files)}: {', '.join(files)} |")


if __name__ == "__main__":
    main()
