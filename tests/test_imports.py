"""What importing costs, and that imports go down the floors of the house only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.support.sft_case import write_case

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "odc_triton"

# Three houses: tools are built on jobs, jobs on the library. Each room may import from itself and from those after it.
TOOLS = ("cli", "tune", "doctor", "profile", "simulate", "memory")
JOBS = ("train", "rl", "trainers", "vllm", "data", "checkpoints", "reports", "launcher", "options")
LIBRARY = (
    *("objectives", "step", "fsdp2", "sharding", "policy", "packs", "recurrent", "checkpoint", "sequence", "optim"),
    *("engine", "plan", "comm", "nn", "machine", "base"),
)
FLOORS = (*(f"tools.{room}" for room in TOOLS), *(f"jobs.{room}" for room in JOBS), *LIBRARY)
# Names that users import, resolved on first use; modules that torchrun starts.
DOORS = ("hf", "balance", "data", "simulate", "train", "run")
# Neither torch nor triton: rooms, and modules of others.
PURE = (
    "base",
    "machine",
    "plan",
    "jobs.options",
    "jobs.reports",
    "tools.simulate",
    "comm.layout",
    "nn.choice",
    "tools.memory.peaks",
)
HEAVY = {"torch", "triton", "transformers", "odc_kernels"}
NEEDS_TORCH = (
    "tools.simulate.models",
    "plan.counter",
    "jobs.reports.fsdp2_record",
    "machine.cuda_devices",
    "machine.probe",
)


@cache
def _modules() -> dict[str, Path]:
    """The file of every module but the package's own __init__, by its name below odc_triton."""
    paths = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name.removesuffix(".__init__"): path for name, path in paths.items() if name != "__init__"}


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        return node.orelse if ast.unparse(node.test).endswith("TYPE_CHECKING") else self.generic_visit(node)


@cache
def imported(source: str, package: str, *, type_checking: bool = True) -> set[str]:
    """Absolute names of all modules that `source`, in `package`, imports anywhere."""
    names: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree if type_checking else _WithoutTypeChecking().visit(tree)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def _imports_of(name: str, path: Path, *, type_checking: bool = True) -> set[str]:
    package = f"odc_triton.{name}" if path.stem == "__init__" else f"odc_triton.{name}".rpartition(".")[0]
    return imported(path.read_text(), package, type_checking=type_checking)


def _ours(name: str, path: Path) -> set[str]:
    """Modules of the package, below odc_triton, that this one imports, also for type checkers and in functions."""
    return {each.removeprefix("odc_triton.") for each in _imports_of(name, path)} & _modules().keys() - {name}


def _room(name: str) -> str:
    """Of a module: its folder, in a house other than the library with that."""
    words = name.split(".")
    return ".".join(words[: 2 if words[0] in ("jobs", "tools") else 1])


def test_pure_modules() -> None:
    for name, path in _modules().items():
        if (name in PURE or _room(name) in PURE) and name not in NEEDS_TORCH:
            heavy = {each.split(".")[0] for each in _imports_of(name, path, type_checking=False)} & HEAVY
            assert not heavy, f"{name} is pure and imports {heavy}"


def test_floors() -> None:
    assert {_room(name) for name in _modules()} <= {*FLOORS, *DOORS, "jobs", "tools"}
    for name, path in _modules().items():
        for other in _ours(name, path) - {"jobs", "tools"}:
            mine, theirs = _room(name), _room(other)
            if mine in DOORS:
                continue
            assert theirs not in DOORS, f"{name} imports {other}, which is for users"
            assert FLOORS.index(mine) <= FLOORS.index(theirs), f"{name} imports {other}, of a higher floor"


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: _ours(name, path) for name, path in _modules().items()}
    while free := {name for name, others in graph.items() if not others & graph.keys()}:
        graph = {name: others for name, others in graph.items() if name not in free}
    while above := graph.keys() - {other for others in graph.values() for other in others}:
        graph = {name: others for name, others in graph.items() if name not in above}
    assert not graph, f"each of these imports another of them: {sorted(graph)}"


def test_nothing_imports_the_folder_of_kernels_by_its_own_name() -> None:
    for folder in ("odc_triton", "tests", "bench", "kernels", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            package = {"kernels": "odc_kernels"}.get(folder, folder)
            text = path.read_text()
            if folder != "kernels" and not re.search(r"\b(?:import|from)\b.*\bkernels\b", text):
                continue  # parsing all files takes seconds
            names = imported(text, package)
            if folder == "kernels":
                roots = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
                assert roots <= {"odc_kernels", "torch", "triton"}, f"{path} imports {roots}"
            assert not any(name == "kernels" or name.startswith("kernels.") for name in names), path
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "examples" / "kernels.py").exists(), "each example would import it in the place of the package"


def test_class_names_are_unique() -> None:
    """In the package and the kernels, whatever their leading underscores."""
    places: dict[str, list[str]] = defaultdict(list)
    for folder in (PACKAGE, ROOT / "kernels"):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 300, "the classes are found"
    assert not {name: found for name, found in places.items() if len(found) > 1}


# One process, that imports more and more. The loop of one's own has what docs tell such users to import.
_STAGES = """
import sys, warnings
warnings.simplefilter("error")
import odc_triton, odc_triton.hf, odc_triton.comm.layout, odc_triton.balance
print("modules", *sys.modules)
from odc_triton import fully_shard, minibatch, full_parameters
print("modules", *sys.modules)
warnings.simplefilter("default")
import torch, odc_triton as odc
from odc_triton.balance import MinibatchSampler, pack_collate
from odc_triton.checkpoint import save_pretrained
from odc_triton.hf import enable_packing, summed_loss
model = odc.fully_shard(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for packs in MinibatchSampler([2, 3], 2, 8):
    with odc.minibatch(model, tokens=1) as step:
        (model(torch.ones(1, 2)).sum() / step.tokens).backward()
    optimizer.step()
print("modules", *sys.modules)
torch.distributed.destroy_process_group()
import logging, pathlib
from odc_triton.base.environment import quiet_bitsandbytes
from odc_triton.jobs.train.sft import train_sft
from tests.support.sft_case import case
train_sft(case(pathlib.Path(sys.argv[1]), steps=1))
print("modules", *sys.modules)
quiet_bitsandbytes()
for line in ("Failed to load CPU gemm_4bit_forward from kernels-community: %s.", "another line"):
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning(line)
"""


def test_importing_is_light(tmp_path: Path) -> None:
    """A loop of one's own loads neither jobs nor tools, nor what only our layers, or ranks of our launcher, need; a run
    without adapters neither peft nor bitsandbytes, which logs a line of no use: where it is imported that is hidden.
    """
    command = [sys.executable, "-c", _STAGES, str(write_case(tmp_path))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [set(line.split()) for line in done.stdout.splitlines() if line.startswith("modules ")]
    names, library, loop, job = found
    assert not {"transformers", "matplotlib", "datasets", "tokenizers"} & library
    assert not {"torch", "triton"} & names
    ours = {name.removeprefix("odc_triton.") for name in loop if name.startswith("odc_triton.")}
    assert not ours & {"nn.tuned", "comm.local_store"}
    assert {"engine", "sharding", "plan", "packs", "checkpoint"} <= set(map(_room, ours)) <= {*LIBRARY, *DOORS}
    assert not {"peft", "bitsandbytes"} & job
    assert "another line" in done.stderr.splitlines()[-1]
    assert "Failed to load" not in done.stderr


def test_options_can_be_read_by_the_oldest_python() -> None:
    """Its `get_type_hints` refuses a plain ClassVar."""
    plain = [name for name, path in _modules().items() if re.search(r": ClassVar\b(?!\[)", path.read_text())]
    assert plain == []
