"""What importing costs, and that imports go down the floors of the house only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "odc_triton"

# Neither torch nor triton.
PURE = (
    *("plan", "balance", "events", "trace", "errors", "order", "choice", "breakdown", "simulate", "source"),
    *("topology", "unusable", "nvml", "nvml_snapshot", "atomic", "activations", "greetings"),
)
HEAVY = {"torch", "triton", "transformers", "odc_kernels"}
NEEDS_TORCH = ("balance.collate", "balance.counter")
# Each module may import those of lower floors and of its own. What is not named stands on top of all.
FLOORS = [
    {"errors", "plan", "events", "balance", "trace", "options", "order", "choice", "breakdown", "source"}
    | {"topology", "unusable", "probe", "nvml", "nvml_snapshot", "cuda_devices", "atomic", "activations"}
    | {"greetings"},
    {"on_owners", "handles", "staging", "tuned"},
    {"memory", "footprint", "report", "streams", "simulated_device", "local_shards", "grid"},
    {"lifelines", "replicas", "meeting", "debug", "relay", "accumulate", "gathered", "backward_end", "process_group"}
    | {"pending_gradient", "local_store"},
    {"sharded_param"},
    {"unit", "engine", "microbatch", "prefetch", "optimizer_watch", "hyperparameters", "functions", "foreach"}
    | {"publication"},
    {"head"},
    {"nn"},
    {"attention"},
    {"module", "collect", "initialize", "backend"},
    {"default_mesh"},
    {"handshake"},
    {"sharding", "api"},
    {"hf", "checkpoint", "launch", "replace", "verification"},
    {"train"},
]


def _modules() -> Iterator[tuple[str, Path]]:
    """(name below odc_triton, file) of every module but the package's own __init__."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts != ("__init__",):
            yield ".".join(parts).removesuffix(".__init__"), path


def imported(source: str, package: str, *, type_checking: bool = False) -> set[str]:
    """Absolute names of all modules that `source`, in `package`, imports anywhere but under TYPE_CHECKING."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not type_checking:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (above, node.module) if part)
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return names


def _imports_of(name: str, path: Path) -> set[str]:
    package = f"odc_triton.{name}" if path.stem == "__init__" else f"odc_triton.{name}".rpartition(".")[0]
    return imported(path.read_text(), package)


def test_the_reader_of_imports() -> None:
    source = (
        "import torch.nn as nn\nfrom .plan import Plan\nfrom ..errors import OdcError\nfrom . import api\n"
        "if TYPE_CHECKING:\n    from .engine import Engine\ndef f():\n    import kernels\n"
    )
    names = imported(source, "odc_triton.comm.memory")
    assert {
        "torch.nn",
        "odc_triton.comm.memory.plan",
        "odc_triton.base.errors",
        "odc_triton.comm.memory.api",
        "kernels",
    } <= names
    assert not any("engine" in name for name in names)


def test_pure_modules() -> None:
    for name, path in _modules():
        if name.split(".")[0] in PURE and name not in NEEDS_TORCH:
            heavy = {top for top in (each.split(".")[0] for each in _imports_of(name, path)) if top in HEAVY}
            assert not heavy, f"{name} is pure and imports {heavy}"


def test_floors() -> None:
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    for name, path in _modules():
        own = floor.get(name.split(".")[0], len(FLOORS))
        for other in _imports_of(name, path):
            if other.startswith("odc_triton."):
                theirs = floor.get(other.split(".")[1], len(FLOORS))
                assert theirs <= own, f"{name} imports {other}, of a higher floor"


def test_nothing_imports_the_folder_of_kernels_by_its_own_name() -> None:
    for folder in ("odc_triton", "tests", "bench", "kernels", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            package = {"kernels": "odc_kernels"}.get(folder, folder)
            names = imported(path.read_text(), package)
            if folder == "kernels":
                roots = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
                assert roots <= {"odc_kernels", "torch", "triton"}, f"{path} imports {roots}"
            assert not any(name == "kernels" or name.startswith("kernels.") for name in names), path
    assert not (ROOT / "kernels" / "__init__.py").exists()


def _python(code: str, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code", ["import odc_triton", "import odc_triton.comm.layout, odc_triton.balance, odc_triton.base.errors"]
)
def test_importing_is_light(code: str) -> None:
    out = _python(f"{code}; import sys; print(*sys.modules)").split()
    for name in ("torch", "triton", "transformers", "matplotlib", "datasets", "torch.distributed.fsdp"):
        assert name not in out


def test_the_engine_needs_neither_transformers_nor_matplotlib() -> None:
    out = _python(
        "from odc_triton import fully_shard, minibatch, full_parameters; import sys; print(*sys.modules)"
    ).split()
    assert "odc_triton.engine.engine" in out
    for name in ("transformers", "matplotlib", "datasets", "tokenizers"):
        assert name not in out


_NOTEBOOK = """
import torch
from torch import nn
from odc_triton import full_parameters, fully_shard, minibatch

for width in (3, 5):  # the second finds the process group that the first made
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2))
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(width, 4), nn.ReLU(), nn.Linear(4, 2)))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    x = torch.randn(6, width)
    for _ in range(3):
        plain(x).square().mean().backward()
        with minibatch(model):
            model(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_parameters(model):
        torch.testing.assert_close(value, plain.get_parameter(name).detach())
print("done")
"""


def test_a_world_of_one_without_a_process_group() -> None:
    assert _python(_NOTEBOOK, OMP_NUM_THREADS="1").strip() == "done"
