"""Hugging Face folders into shards and out of them: same values, same logits, no private copies."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from odc_triton import full_parameters, fully_shard
from odc_triton.base.errors import CheckpointCorrupt, CheckpointDiffers, CheckpointFailed
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained
from odc_triton.checkpoint.pretrained import load_causal_lm
from odc_triton.checkpoint.write_pretrained import is_of_a_model
from odc_triton.engine.module import below_wrappers
from odc_triton.jobs.data.tokenizer import read_tokenizer
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.models import MIXTURES, build
from tests.support.sft_case import QWEN2
from tests.support.trl_case import tokenizer

IDS = torch.arange(3, 12)[None]


def _sharded(folder: Path) -> nn.Module:
    model = fully_shard(meta_causal_lm(model=str(folder)))
    load_pretrained_shards(model, folder)
    return model.eval()


def _loaded_and_exported(
    rank: int, world: int, folder: Path, out: Path, dtype: torch.dtype | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = _sharded(folder)
    if rank == 0:  # transformers itself would not write a temperature of greedy decoding
        with mock.patch.object(model.generation_config, "temperature", 0.5):
            save_pretrained(model, out, dtype=dtype, shard_bytes=20_000)
    else:
        with pytest.raises(RuntimeError, match="rank 0 only"):
            save_pretrained(model, out)
    with pytest.raises(
        RuntimeError, match=r"odc_triton\.checkpoint\.save_pretrained\(model, folder, tokenizer\) on rank 0"
    ):
        model.save_pretrained(out / "own")
    with pytest.raises(NotImplementedError, match="call it before fully_shard"):
        model.resize_token_embeddings(300)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(out / "own", state_dict=state)
    dist.barrier()
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits, dict(full_parameters(model))


def _plain_logits(folder: Path, **options: object) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("qwen2", "one"),
        ("gpt2-tied", "many"),
        ("qwen3-moe", "many"),
        ("deepseek-v3", "one"),  # with a persistent buffer
        *(slow(name, "many") for name in MIXTURES if name != "deepseek-v3"),
    ],
)
def test_a_folder_in_and_out(tmp_path: Path, name: str, files: str) -> None:
    """Rows of tied, merged (experts) and odd tensors, over two ranks: what comes out is bitwise what went in."""
    model = build(name, seed=3)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(tmp_path / "in", max_shard_size="30KB" if files == "many" else "1GB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists() == (files == "many")
    want = _plain_logits(tmp_path / "in")
    for logits, weights in ranks.run(_loaded_and_exported, 2, tmp_path / "in", tmp_path / "out", None):
        torch.testing.assert_close(weights, dict(model.named_parameters()), rtol=0, atol=0)
        # The same numbers at other addresses, for which the library may choose another kernel.
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(_plain_logits(tmp_path / "out"), want)
    assert torch.equal(_plain_logits(tmp_path / "out" / "own"), want)
    config, generation = (json.loads((tmp_path / "out" / f"{n}config.json").read_text()) for n in ("", "generation_"))
    assert config["architectures"] == [type(model).__name__]
    assert config["dtype"] == "float32"
    assert (generation["max_new_tokens"], generation["temperature"]) == (7, 0.5)
    written = [path.name for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(written) > 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    # The same tensors under the same names as transformers itself writes.
    torch.testing.assert_close(_tensors(tmp_path / "out"), _tensors(tmp_path / "in"), rtol=0, atol=0)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_in_bf16(tmp_path: Path) -> None:
    """Stored in bf16, masters in fp32, out in bf16: no value changes on the way."""
    build("qwen2", seed=3).to(torch.bfloat16).save_pretrained(tmp_path / "in")
    ((logits, _),) = ranks.run(_loaded_and_exported, 1, tmp_path / "in", tmp_path / "out", torch.bfloat16)
    assert logits.dtype == torch.float32
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in _tensors(tmp_path / "out").values()} == {torch.bfloat16}
    assert torch.equal(_plain_logits(tmp_path / "out"), _plain_logits(tmp_path / "in"))
    # The same numbers at other addresses, as above.
    torch.testing.assert_close(logits, _plain_logits(tmp_path / "in", dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_other_models_are_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "llama")
    build("qwen2").save_pretrained(tmp_path / "qwen2")
    model = fully_shard(meta_causal_lm(model=str(tmp_path / "qwen2")))
    with pytest.raises(CheckpointDiffers, match=r"q_proj\.bias is not in the files"):
        load_pretrained_shards(model, tmp_path / "llama")
    with pytest.warns(UserWarning, match=r"6 tensors that the model does not have: .*bias"):
        load_pretrained_shards(fully_shard(build("llama")), tmp_path / "qwen2")
    with pytest.raises(CheckpointDiffers, match=r"gate_proj\.weight is \[48, 32\] in the files and \[64, 32\] here"):
        load_pretrained_shards(fully_shard(causal_lm("Qwen2", intermediate_size=64)), tmp_path / "qwen2")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointFailed, match=r"pytorch_model\.bin, a pickle, .* convert it once"):
        load_pretrained_shards(model, pickled)
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointFailed, match=r"model\.safetensors\.index\.json: it has no weights"):
        load_pretrained_shards(model, tmp_path / "none")


def test_a_folder_below_wrappers(tmp_path: Path) -> None:
    build("qwen2", seed=3).save_pretrained(tmp_path)
    model = meta_causal_lm(model=str(tmp_path))
    model.model.layers = nn.ModuleList(map(checkpoint_wrapper, model.model.layers))
    load_pretrained_shards(model := fully_shard(model), tmp_path)
    got, want = dict(full_parameters(model)), dict(build("qwen2", seed=3).named_parameters())
    assert [*map(below_wrappers, got)] == [*want]
    for value, its in zip(got.values(), want.values(), strict=True):
        assert torch.equal(value, its)


def test_a_cut_file(tmp_path: Path) -> None:
    build("qwen2").save_pretrained(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors can't be read"):
        load_pretrained_shards(fully_shard(build("qwen2")), tmp_path)


def test_an_export_does_not_replace(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not a sharded transformers model"):
        save_pretrained(nn.Linear(2, 2), tmp_path)
    model = fully_shard(build("qwen2"))
    (tmp_path / "out").mkdir()
    for name in ("mine", "adapter_model.safetensors", "model-00001-of-00002.safetensors", "model-old.safetensors"):
        (tmp_path / "out" / name).touch()
    with pytest.raises(FileExistsError, match="is not empty: give another folder, or overwrite=True"):
        save_pretrained(model, tmp_path / "out")
    save_pretrained(model, tmp_path / "out", overwrite=True)  # an older model's files go, others stay
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {"mine", "model-old.safetensors", "model.safetensors", "config.json", "generation_config.json"}


def test_what_transformers_writes_is_a_models(tmp_path: Path) -> None:
    written = build("qwen2"), tokenizer()
    written[1].chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    for each in written:
        each.save_pretrained(tmp_path, max_shard_size="20KB")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"model.safetensors.index.json", "additional_chat_templates", "tokenizer.json"} <= names
    assert [name for name in names if not is_of_a_model(name)] == []
    older = ("pytorch_model-00001-of-00002.bin", "adapter_model.bin", "spiece.model", "sentencepiece.bpe.model")
    assert all(map(is_of_a_model, older))
    others = ("notes.txt", "config.txt", "model.py", "model.bin", "my_config.json", "checkpoint-1")
    assert not any(map(is_of_a_model, others))


def _memory(rank: int, world: int, folder: Path, out: Path) -> list[int]:
    from bench.harness import PeakMemory

    small = fully_shard(build("qwen2"))  # what torch and transformers set up on first use
    small(input_ids=IDS)
    model = fully_shard(meta_causal_lm(model=str(folder)))
    peaks = []
    dist.barrier()
    before, _ = PeakMemory.read()
    with PeakMemory(every_s=0.002) as peak:
        load_pretrained_shards(model, folder)
    peaks.append(peak.private_bytes - before)
    dist.barrier()
    before, _ = PeakMemory.read()
    with PeakMemory(every_s=0.002) as peak:
        if rank == 0:
            save_pretrained(model, out, shard_bytes=4_000_000)
        dist.barrier()
    peaks.append(peak.private_bytes - before)
    return peaks


def test_no_private_copy(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "vocab_size": 8192}
    model = causal_lm("Qwen2", **sizes)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(tmp_path / "in")
    del model
    largest_bytes = 8192 * 256 * 4
    assert model_bytes > 50e6
    for rank, (loading, saving) in enumerate(ranks.run(_memory, 2, tmp_path / "in", tmp_path / "out")):
        # One tensor's rows; twice, as malloc may keep what it freed. The whole model is 55 MB.
        assert loading < 2 * largest_bytes + 4e6, (rank, loading)
        # Rank 0: a unit, here the root's two large tensors, and a file's worth of tensors.
        assert saving < (3 * largest_bytes + 8e6 if rank == 0 else 2e6), (rank, saving)


def test_one_source_which_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (folder := Path("a", "model")).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(QWEN2))
    for given in ({"model": folder}, {"init": folder / "config.json"}):
        assert type(meta_causal_lm(**given)).__name__ == "Qwen2ForCausalLM"
    with pytest.raises(OSError, match=r"model\.safetensors"):  # which is transformers'
        load_causal_lm(model=folder, init=None)  # pyright: ignore[reportArgumentType]
    for load in (meta_causal_lm, load_causal_lm):
        for both in (None, "a/model"):
            with pytest.raises(ValueError, match="give either model"):
                load(model=both, init=both)


def test_a_models_own_code_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    for read in (
        lambda: meta_causal_lm(model=str(tmp_path)),
        lambda: load_causal_lm(model=str(tmp_path), init=None),
        lambda: read_tokenizer(str(tmp_path)),
    ):
        with pytest.raises(
            ValueError, match=r"own code \(auto_map.*odc-triton runs no code from a model's folder"
        ) as caught:
            read()
        assert "trust_remote_code" not in str(caught.value)  # no command here takes it
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "can't make a causal LM of this config|is not the config of a model"),
        ({"hidden_act": "foo"}, "can't make a causal LM of this config .*foo|is not the config of a model"),
        (
            {"intermediate_size": "wide"},
            r"can't make a causal LM of this config \(TypeError|is not the config of a model",
        ),
        ('{"model_type": ', "is not valid JSON .* give the config.json of a model"),
        ("[]", "holds a list, not an object: give the config.json of a model"),
    ],
)
def test_a_config_of_no_model_is_named(tmp_path: Path, changes: dict | str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(changes if isinstance(changes, str) else json.dumps(QWEN2 | changes))
    with pytest.raises(ValueError, match=said) as caught:
        meta_causal_lm(init=str(path))
    assert str(caught.value).startswith(str(path))
