"""What models save whose frozen parameters are in a base's ranks: the files of the same models without a base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import fully_shard, minibatch, own_mesh, serving
from odc_triton.checkpoint import save_pretrained
from odc_triton.checkpoint.base_model import FILE
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from tests.support import ranks, slow
from tests.support.families import with_lora
from tests.support.models import CASES, build, microbatches
from tests.support.refusals import caught

BF16 = torch.bfloat16
# param_dtype: the values are those of a folder in that dtype, and the base's parameters too.
KINDS = {"fp32": None, "bf16": BF16}
Made = tuple[nn.Module, torch.optim.Optimizer]


def _frozen(kind: str) -> nn.Module:
    dtype = KINDS[kind] or torch.float32
    return build("qwen2").to(dtype).requires_grad_(False)


def _made(kind: str, group: list[int], base: nn.Module | None, name: str) -> Made:
    policy = MixedPrecisionPolicy(param_dtype=KINDS[kind])
    model = with_lora(_frozen(kind).float())
    model.peft_config["default"].base_model_name_or_path = name
    fully_shard(model, mesh=own_mesh(group), base=base, mp_policy=policy)
    return model, torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def _steps(made: Made, rank: int, group: list[int]) -> None:
    for step in range(2):
        with minibatch(made[0], tokens=1):
            for batch in microbatches("qwen2", [6, 9], seed=step)[group.index(rank) :: len(group)]:
                CASES["qwen2"].loss(made[0], batch).backward()
        made[1].step()


def _values(made: Made) -> list[torch.Tensor]:
    with torch.no_grad():
        (batch,) = microbatches("qwen2", [8], seed=9)
        logits = made[0](input_ids=batch[0], use_cache=False).logits
    return [logits, *(each.to_local().clone() for each in made[0].parameters() if each.requires_grad)]


def _saved(rank: int, world: int, kind: str, groups: list[list[int]], folder: Path) -> list[Any]:
    """Errors, and whether each model that has loaded the other's checkpoint is as the other."""
    group = next(each for each in groups if rank in each)
    base, found, values = fully_shard(_frozen(kind)), [], {}
    with serving(base):
        for with_base in (None, base):
            here = folder / f"{group[0]}-{'borrowed' if with_base else 'own'}"
            torch.manual_seed(rank)
            made = _made(kind, group, with_base, "some/folder")
            _steps(made, rank, group)
            write_checkpoint(here, model=made[0], optimizer=made[1], state={"step": 2}, step=2)
            if rank == group[0]:
                save_pretrained(made[0], here / "adapter")
            values[here] = _values(made)
        for (here, _), (_, want), lender in zip(values.items(), reversed(values.items()), (base, None), strict=True):
            made = _made(kind, group, lender, "another/name")
            assert load_checkpoint(here, model=made[0], optimizer=made[1]) == {"step": 2}
            found += [torch.equal(*pair) for pair in zip(_values(made), want, strict=True)]
        if len(group) == 1 and kind == "fp32":
            found.append(_nameless(group, base, folder / f"{rank}-nameless"))
    return found


def _nameless(group: list[int], base: nn.Module, folder: Path) -> str:
    """A base that can't be found again: a model that has it in its checkpoints can't give it to one that borrows."""
    own, borrowed = _made("fp32", group, None, ""), _made("fp32", group, base, "")
    for made, name in ((own, "own"), (borrowed, "borrowed")):
        write_checkpoint(Path(f"{folder}-{name}"), model=made[0], optimizer=made[1], state={}, step=0)
    load_checkpoint(Path(f"{folder}-borrowed"), model=borrowed[0], optimizer=None)
    return caught(lambda: load_checkpoint(Path(f"{folder}-own"), model=borrowed[0], optimizer=None))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


@pytest.mark.parametrize(
    ("kind", "groups"), [("fp32", [[0, 1]]), slow("bf16", [[0, 1]]), slow("bf16", [[0], [1]]), slow("fp32", [[0], [1]])]
)
def test_as_without_base(kind: str, groups: list[list[int]], tmp_path: Path) -> None:
    for found in ranks.run(_saved, 2, kind, groups, tmp_path):
        if len(groups) > 1 and kind == "fp32":
            assert "is not in this" in found.pop()
        assert found
        assert all(each is True for each in found)
    for group in groups:
        own, borrowed = (_files(tmp_path / f"{group[0]}-{which}") for which in ("own", "borrowed"))
        assert FILE in own
        assert own.keys() == borrowed.keys()
        assert [name for name in own if own[name] != borrowed[name]] == []
