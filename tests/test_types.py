"""Type checkers see what a user's program imports: every public name has a type, and a correct program no error."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.test_public_names import PUBLIC

ROOT = Path(__file__).parents[1]
PROGRAM = """
import torch
from torch import nn
from torch.utils.data import DataLoader

from odc_triton import MixedPrecisionPolicy, __version__, fully_shard, memory_plan, minibatch, replace_layers
from odc_triton.balance import CostModel, MinibatchSampler, PackedDataset, pack_collate
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.nn import Linear
from odc_triton.optim import Muon
from odc_triton.simulate import MODELS, Job, simulate


def train(model: nn.Module, samples: list[dict[str, torch.Tensor]], lengths: list[int]) -> str:
    enable_packing(model)
    replace_layers(model, roles=("linear",))
    sharded = fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)
    cost = CostModel(quadratic=1.0, linear=2.0)
    sampler = MinibatchSampler(lengths, token_cap=512, samples_per_rank=2, rank=0, world=1, cost=cost)
    for packs in DataLoader(PackedDataset(samples), batch_sampler=sampler, collate_fn=pack_collate):
        with minibatch(sharded, tokens=3):
            for pack in packs:
                summed_loss(sharded, pack).backward()
        optimizer.step()
        optimizer.zero_grad()
    return __version__
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `user.py`: a training loop, and every public name; and our packages where checkers look."""
    folder = tmp_path_factory.mktemp("user")
    for name, home in (("odc_triton", "odc_triton"), ("odc_kernels", "kernels")):
        (folder / name).symlink_to(ROOT / home)
    lines = [PROGRAM]
    for package in PUBLIC:
        names = importlib.import_module(package).__all__
        lines += [f"import {package}", *(f"reveal_type({package}.{name})" for name in names)]
    (folder / "user.py").write_text("\n".join(lines) + "\n")
    return folder


# Type errors of what `make lint` does not check yet. They only become fewer; a folder or file without any goes into
# [tool.basedpyright] of pyproject.toml.
ERRORS = {
    "kernels/": 133,
    "odc_triton/jobs/checkpoints/": 7,
    "odc_triton/jobs/data/": 72,
    "odc_triton/jobs/launcher/": 2,
    "odc_triton/jobs/options/": 5,
    "odc_triton/jobs/reports/": 6,
    "odc_triton/jobs/rl/": 24,
    "odc_triton/jobs/train/": 45,
    "odc_triton/jobs/trainers/": 131,
    "odc_triton/jobs/vllm/": 7,
    "odc_triton/tools/cli/": 1,
    "odc_triton/tools/doctor/": 4,
    "odc_triton/tools/memory/": 1,
    "odc_triton/tools/profile.py": 7,
    "odc_triton/tools/simulate/": 8,
    "odc_triton/tools/tune/": 21,
}

CHECKERS = {
    "mypy": ("mypy", "--follow-imports", "silent", "--python-executable", sys.executable),
    "pyright": ("basedpyright", "--outputjson", "--pythonpath", sys.executable),
}
REVEALED = re.compile(r"""(?:Revealed type is "|Type of "[^"]*" is ")([^"]*)""")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_users_program(program: Path, checker: str) -> None:
    (program / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    words = [str(Path(sys.executable).with_name(CHECKERS[checker][0])), *CHECKERS[checker][1:], "user.py"]
    said = subprocess.run(words, cwd=program, capture_output=True, text=True).stdout
    about = [line for line in said.splitlines() if "user.py:" in line]
    if checker == "pyright":
        about = [f"{each['severity']}: {each['message']}" for each in json.loads(said)["generalDiagnostics"]]
    assert [line for line in about if re.search(r"^(user.py:\d+: )?error: ", line)] == []
    types = [found for line in about for found in REVEALED.findall(line)]
    names = sum(len(importlib.import_module(package).__all__) for package in PUBLIC)
    assert len(types) == names
    assert [each for each in types if each.removeprefix("builtins.") in ("object", "Any", "Unknown")] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_errors_of_other_folders() -> None:
    words = [str(Path(sys.executable).with_name("basedpyright")), "--outputjson", "odc_triton", "kernels"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
    errors = [each for each in json.loads(said)["generalDiagnostics"] if each["severity"] == "error"]
    paths = [Path(each["file"]).relative_to(ROOT).as_posix() for each in errors]
    assert Counter(next((room for room in ERRORS if path.startswith(room)), path) for path in paths) == ERRORS
