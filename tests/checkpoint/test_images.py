"""Models that see pictures, in Hugging Face folders: read by rows, written for plain transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from odc_triton import fully_shard, minibatch
from odc_triton.balance import pack_collate
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained, with_adapter
from odc_triton.checkpoint.pretrained import load_causal_lm
from odc_triton.checkpoint.steps import Checkpoints
from odc_triton.hf import enable_packing
from odc_triton.hf.images import TOWER
from odc_triton.hf.loss import model_inputs, summed_loss
from tests.support import ranks, slow
from tests.support.vision import FAMILIES, alone

SIZES = [(9, 2), (7, 0), (8, 1)]  # tokens of text, pictures


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


def _with_adapters(base: Path) -> nn.Module:
    """On layers of the text, and of each family's tower."""
    import peft

    model = meta_causal_lm(model=str(base))
    enable_packing(model)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj", "fc1", "qkv", "linear_fc1"], lora_dropout=0.0)
    model = fully_shard(with_adapter(model, config))
    load_pretrained_shards(model, base)
    return model


def _adapted(rank: int, world: int, family: str, base: Path, out: Path) -> None:
    model = _with_adapters(base).train()
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
    for _ in range(2):  # in the first A has no gradient, as B is 0
        packs = pack_collate([[FAMILIES[family].samples(SIZES)[each]] for each in ([0], [1, 2])[rank]])
        with minibatch(model, tokens=1):
            for pack in packs:
                summed_loss(model, pack).backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        save_pretrained(model, out / "adapter")
        save_pretrained(model, out / "merged", merge=True)
    dist.barrier()
    Checkpoints(out / "run", keep=1).save(model=model, optimizer=optimizer, state={}, step=2)


def _read_again(rank: int, world: int, family: str, base: Path, out: Path) -> Tensor:
    model = _with_adapters(base).eval()
    checkpoints = Checkpoints(out / "run", keep=1)
    checkpoints.load(checkpoints.newest(), model=model, optimizer=None)
    (pack,) = pack_collate([FAMILIES[family].samples(SIZES)])
    with torch.no_grad():
        return model(**model_inputs(pack, model)).logits[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_text_and_tower(family: str, tmp_path: Path) -> None:
    """Alone for plain PEFT, added to their base for plain transformers, and in a checkpoint for other ranks."""
    import peft

    base = FAMILIES[family].model(seed=3)
    base.save_pretrained(tmp_path / "in")
    ranks.run(_adapted, 2, family, tmp_path / "in", tmp_path)
    by_peft = peft.PeftModel.from_pretrained(plain(tmp_path / "in"), tmp_path / "adapter").eval()
    moved = [name for name, value in by_peft.named_parameters() if "lora_B" in name and value.any()]
    assert 0 < sum(bool(re.fullmatch(TOWER, name)) for name in moved) < len(moved)
    wanted = answers(by_peft.get_base_model(), family)
    assert (wanted - answers(plain(tmp_path / "in"), family)).abs().max() > 1e-2
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(answers(plain(tmp_path / "merged"), family), wanted, **close)
    for found in ranks.run(_read_again, 3, family, tmp_path / "in", tmp_path):
        torch.testing.assert_close(found, wanted, **close)
