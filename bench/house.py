"""How far features reach into the package, what stands behind an entry, and which files a call passes.

    python -m bench.house              # of this checkout
    python bench/house.py              # in the root of another one, with its packages importable

A file knows a feature if it imports from the feature's home, or uses an identifier that belongs to it. Behind an entry
stand all files that it imports, also in functions. The files that a call passes are traced on one rank. `BUDGETS` are
tests (tests/bench/test_house.py): who needs more says why, and raises them.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import re
import sys
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

PACKAGE = Path.cwd() / "odc_triton"


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
        ("sequence/*", "recurrent/*", "plan/segments.py", "plan/cuts.py", "plan/split.py"),
        r"enable_split|split_(tokens|sequences|across_hosts|forward|bytes)|SplitPlan|(No)?Segments?|blocked_on",
    ),
    "hybrids": Feature(
        ("recurrent/*", "plan/recurrence.py", "plan/cuts.py"),
        r"[Rr]ecurren\w*|recurs|recurring|is_hybrid|split_cuts|rows_per_cut|padding_leaks|separate_documents",
    ),
    "shared prefixes": Feature(
        ("plan/relatives.py", "plan/shared.py", "plan/line.py", "sequence/tree.py", "sequence/flash.py"),
        r"\w*shares?_prefix\w*|[Rr]elatives|AttentionOfTree",
    ),
    "images": Feature(
        (
            *("packs/image_fields.py", "packs/images.py", "plan/tower.py", "jobs/train/vision.py"),
            "jobs/trainers/image_records.py",
            *(f"jobs/data/{name}.py" for name in ("image_files", "shown", "parts", "vision")),
        ),
        r"(?i:\w*(images|image_|vision|tower)\w*)|VisionProcessor|image_blocks",
    ),
    "replicas": Feature(("comm/replicas.py", "comm/peers.py"), r"(?i:\w*replicas?(_\w+)?)|PeerStatus"),
    "bridge to FSDP2": Feature(("fsdp2/*",), r"Bridged\w*|use_odc"),
    "Muon": Feature(("optim/muon.py", "optim/buffers.py", "optim/chained.py"), r"(?i:\w*muon\w*)"),
    "background checkpoints": Feature(("jobs/checkpoints/background.py",), r"(?i:\w*background\w*)|is_dropped"),
    "hyperparameters": Feature(("engine/steps.py",), r"(?i:hyperparameters)"),
}


# (most now, what the plan wants or None). Lines behind an import in a file of the package's own folder, to full 50:
BEHIND: dict[str, tuple[int, int | None]] = {
    "from . import fully_shard, minibatch": (9_320, 7_000),
    "from . import use_odc": (10_030, None),
    "from . import replace_layers": (3_400, None),
    "from .balance import MinibatchSampler": (3_780, None),
    "from .hf import enable_packing, summed_loss": (11_030, None),
    "from .hf import ODCTrainer": (25_040, None),
    "from .jobs.train import sft": (34_590, None),
    "from .jobs.train import grpo": (36_730, None),
}
# Files that know a feature, and files on a way:
BUDGETS: dict[str, tuple[int, int | None]] = {
    "scalars": (6, None),
    "exact sums": (14, None),
    "split sequences": (32, 16),
    "hybrids": (25, None),
    "shared prefixes": (24, 10),
    "images": (31, 16),
    "replicas": (36, 22),
    "bridge to FSDP2": (3, None),
    "Muon": (2, None),
    "background checkpoints": (5, None),
    "hyperparameters": (1, None),
    "fully_shard": (23, 18),
    "entry": (11, None),
    "forward": (8, None),
    "gradient, from leaf to owner": (6, None),
    "exit": (8, None),
    "step": (7, None),
    "a step of ODCTrainer": (28, 18),
    "a step of train sft": (40, 23),
    "a step of train grpo": (55, 34),
    "a step of train grpo, overlapped": (55, 34),
}

_IDENTIFIER = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg"} | dict.fromkeys(
    (ast.FunctionDef, ast.ClassDef, ast.alias), "name"
)


class Source(NamedTuple):
    """A file of the package, or a stub: its lines, public names, identifiers, and imports from the package; `loads`:
    without those for type checkers.
    """

    lines: int
    exports: int
    words: set[str]
    imports: list[ast.ImportFrom]
    loads: list[ast.ImportFrom]


def read(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    blocks = [each for each in tree.body if isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test)]
    typing = {node for block in blocks for node in ast.walk(block)}
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level]
    targets = [node.targets[0] if isinstance(node, ast.Assign) else node for node in tree.body]
    named = (ast.FunctionDef, ast.ClassDef, ast.Name)
    names = [getattr(node, _IDENTIFIER[type(node)]) for node in targets if isinstance(node, named)]
    return Source(
        lines=text.count("\n"),
        exports=sum(not name.startswith("_") for name in names),
        words={str(getattr(node, field)) for node in nodes if (field := _IDENTIFIER.get(type(node)))},
        imports=imports,
        loads=[node for node in imports if node not in typing],
    )


class House:
    """The package's files as they are now."""

    def __init__(self) -> None:
        paths = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]
        self.sources = {path.relative_to(PACKAGE).as_posix(): read(path) for path in sorted(paths)}

    def _imported(self, path: str, node: ast.ImportFrom) -> Iterator[str]:
        """The files that an import in `path` names: of names that a stub resolves, those where they are."""
        folder = path.split("/")[:-1]
        above = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
        base = "".join(f"{part}/" for part in above if part)
        for name in (alias.name for alias in node.names):
            inside = [each for each in (f"{base}{name}.py", f"{base}{name}/__init__.py") if each in self.sources]
            stub = self.sources.get(f"{base}__init__.pyi")
            homes = [each for each in stub.imports if name in {of.asname for of in each.names}] if stub else []
            if homes and not inside:
                yield from self._imported(f"{base}__init__.pyi", homes[0])
            else:
                files = (*inside, f"{base[:-1]}.py", f"{base}__init__.py")
                yield from [each for each in files if each in self.sources][:1]

    def reach(self, feature: Feature) -> tuple[int, list[str]]:
        """(public names of its home, other files that know it)."""
        home = {path for path in self.sources if any(fnmatch(path, pattern) for pattern in feature.home)}
        word = re.compile(feature.words)
        knows = [
            path
            for path, source in self.sources.items()
            if path not in home and not path.endswith(".pyi")
            if any(home.intersection(self._imported(path, node)) for node in source.imports)
            or any(map(word.fullmatch, source.words))
        ]
        return sum(self.sources[path].exports for path in home), knows

    def training_places(self) -> list[str]:
        """Where packs are trained: a minibatch is opened, and in a loop inside of it a backward runs."""

        def calls(node: ast.AST, name: str) -> bool:
            made = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
            return any(getattr(each, "attr", getattr(each, "id", None)) == name for each in made)

        return [
            f"{path}:{node.lineno}"
            for path in sorted(self.sources)
            for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
            if isinstance(node, ast.With) and any(calls(item.context_expr, "minibatch") for item in node.items)
            if any(isinstance(each, ast.For) and calls(each, "backward") for each in ast.walk(node))
        ]

    def behind(self, entry: str) -> tuple[int, list[str]]:
        """(lines, files) behind an import."""
        found: set[str] = set()
        left = [("entry", node) for node in ast.parse(entry).body]
        while left:
            for path in set(self._imported(*left.pop())) - found:
                found.add(path)
                left += [(path, node) for node in self.sources[path].loads]
        return sum(self.sources[path].lines for path in found), sorted(found)


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


def of_engine() -> dict[str, list[str]]:
    """The files that `fully_shard` passes, and each part of a minibatch and a step."""
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
        hooks[key] = _traced(hook, found, "gradient, from leaf to owner")
        loss.backward()
        hooks[key] = hook
        with Trace() as found["exit"]:
            block.__exit__(None, None, None)
        with Trace() as found["step"]:
            optimizer.step()
    return found


def _traced(function: Callable, found: dict[str, list[str]], way: str) -> Callable:
    """`function`, of whose calls the second is kept, if there is one: the first imports, the last saves."""
    calls: list[list[str]] = []

    def traced(*args: Any, **options: Any) -> Any:
        with Trace() as files:
            result = function(*args, **options)
        calls.append(files)
        found[way] = calls[:2][-1]
        return result

    return traced


def of_jobs() -> dict[str, list[str]]:
    """The files that one step of each kind of job passes, on the cases of the tests."""
    from odc_triton.hf import ODCTrainer
    from odc_triton.jobs.train import grpo, grpo_run, sft, sft_run
    from tests.support import grpo_case, sft_case
    from tests.support.trainer_case import odc_trainer

    found: dict[str, list[str]] = {}
    quiet = contextlib.redirect_stdout(sys.stderr)
    recorded = mock.patch.object(grpo, "_engine", return_value=grpo_case.Recorded(sft_case.VOCABULARY))
    with TemporaryDirectory() as name, recorded, quiet:
        folder = grpo_case.write_prompts(Path(name))
        with _step_of(sft_run.SftRun, "train_step", found, "a step of train sft"):
            sft.train_sft(sft_case.case(folder, steps=3))
        for overlap, way in (("off", "a step of train grpo"), ("auto", "a step of train grpo, overlapped")):
            options = grpo_case.case(folder, steps=3, overlap_rollout=overlap, out=str(folder / overlap))
            with _step_of(grpo_run.GrpoRun, "train_step", found, way):
                grpo.train_grpo(options)
        trainer = odc_trainer(str(folder / "trainer"), 1, max_steps=3)
        with _step_of(ODCTrainer, "training_step", found, "a step of ODCTrainer"):
            trainer.train()
    return found


def _step_of(kind: type, method: str, found: dict[str, list[str]], way: str) -> Any:
    return mock.patch.object(kind, method, _traced(getattr(kind, method), found, way))


def main() -> None:
    house = House()
    known = {name: house.reach(feature) for name, feature in FEATURES.items()}
    behind = {entry: house.behind(entry) for entry in BEHIND}
    print(
        "| feature | public names of its home | other files that know it | budget, wanted |\n| --- | --: | --: | --: |"
    )
    for name, (names, files) in known.items():
        print(f"| {name} | {names} | {len(files)} | {BUDGETS[name]} |")
    print("\n| entry | lines behind it | files | budget, wanted |\n| --- | --: | --: | --: |")
    for name, (lines, files) in behind.items():
        print(f"| {name} | {lines} | {len(files)} | {BEHIND[name]} |")
    if "--files" in sys.argv:
        for name, (_, files) in [*known.items(), *behind.items()]:
            print(f"\n{name}: {', '.join(files)}")
    print(f"\nplaces that train inside a minibatch: {', '.join(house.training_places())}")
    print("\n| way | budget, wanted | files |\n| --- | --: | --- |")
    for name, files in (of_engine() | of_jobs()).items():
        print(f"| {name} | {BUDGETS[name]} | {len(files)}: {', '.join(files)} |")


if __name__ == "__main__":
    main()
