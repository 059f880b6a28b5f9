"""Models that see images, in Hugging Face folders: read by rows, written for plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from odc_triton import fully_shard
from odc_triton.balance import pack_collate
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained
from odc_triton.checkpoint.pretrained import load_causal_lm
from odc_triton.hf import enable_packing
from odc_triton.packs.loss import model_inputs
from tests.support import ranks, slow
from tests.support.vision import FAMILIES, alone

SIZES = [(9, 2), (7, 0), (8, 1)]  # tokens of text, images


def plain(folder: Path) -> nn.Module:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def answers(model: nn.Module, family: str) -> Tensor:
    with torch.no_grad():
        return torch.cat([alone(model, each) for each in FAMILIES[family].samples(SIZES)])


def _in_and_out(rank: int, world: int, family: str, folder: Path, out: Path) -> Tensor:
    model = meta_causal_lm(model=str(folder))
    enable_packing(model)
    model = fully_shard(model).eval()
    load_pretrained_shards(model, folder)
    if rank == 0:
        save_pretrained(model, out)
    dist.barrier()
    (pack,) = pack_collate([FAMILIES[family].samples(SIZES)])
    with torch.no_grad():
        return model(**model_inputs(pack, model)).logits[0]


@pytest.mark.parametrize("family", ["qwen2_5_vl", *(slow(name) for name in FAMILIES if name != "qwen2_5_vl")])
def test_a_folder_in_and_out(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family].model(seed=3)
    model.save_pretrained(tmp_path / "in")
    want = answers(plain(tmp_path / "in"), family)
    for found in ranks.run(_in_and_out, 2, family, tmp_path / "in", tmp_path / "out"):
        # In a pack, and at other addresses, sums come in another order.
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert torch.equal(answers(plain(tmp_path / "out"), family), want)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("in", "out")]
    assert files[0].keys() == files[1].keys()  # the names that transformers itself writes
    loaded = load_causal_lm(model=str(tmp_path / "out"), init=None)
    assert type(loaded) is type(model)
