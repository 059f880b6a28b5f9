"""A model's folder read by `meta_causal_lm` and `load_pretrained_shards`, against transformers' `from_pretrained`."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from odc_triton import full_parameters, fully_shard
from odc_triton.base.errors import CheckpointDiffers
from odc_triton.checkpoint import load_pretrained_shards, meta_causal_lm, save_pretrained
from odc_triton.jobs.rl.generation import Request, SamplingOptions
from odc_triton.jobs.rl.transformers_engine import TransformersEngine
from odc_triton.jobs.train import sft
from odc_triton.tools.cli.export import ExportOptions, export
from tests.support import jobs, slow
from tests.support.families import SIZES, causal_lm
from tests.support.sft_case import case, write_case
from tests.support.versions import is_older, since
from tests.support.vision import FAMILIES

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def saved(folder: Path, seed: int = 0, *, size: str = "1GB", family: str = "Llama", **changes: object) -> nn.Module:
    torch.manual_seed(seed)
    model = causal_lm(family, vocab_size=300, **changes)
    model.save_pretrained(folder, max_shard_size=size)
    return model


def several(folder: Path, seed: int = 0) -> dict[str, str]:
    """A folder of several files; returns its index's map."""
    saved(folder, seed, size="20KB")
    return json.loads((folder / INDEX).read_text())["weight_map"]


def configured(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = {name: value.contiguous().clone() for name, value in change(load_file(folder / SINGLE)).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def beside_old_parts(folder: Path, *, removed: bool) -> None:
    several(folder, seed=1)
    kept = {path: path.read_bytes() for path in folder.glob("model-*")}
    index = (folder / INDEX).read_text()
    saved(folder)
    (folder / INDEX).write_text(index)
    for path, content in {} if removed else kept.items():
        path.write_bytes(content)


def without_names_in_the_index(folder: Path) -> None:
    named = several(folder)
    left = {file: name for name, file in named.items()}  # one of each file
    weight_map = {name: file for file, name in left.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def named_by_the_config(folder: Path) -> None:
    saved(folder, seed=1)
    (folder / SINGLE).rename(folder / "other.safetensors")
    saved(folder)
    configured(folder, transformers_weights="other.safetensors")


def of_the_base_model(folder: Path) -> None:
    saved(folder, tie_word_embeddings=True).model.save_pretrained(folder)


def tied(folder: Path, change: Callable[[dict], dict], **changes: object) -> None:
    saved(folder, tie_word_embeddings=True, **changes)
    rewritten(folder, change)


def head_moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The head differs from the embedding in its last number."""
    head = tensors[EMBEDDING].clone()
    head[-1, -1] += 1
    return tensors | {HEAD: head}


def head_alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {HEAD if name == EMBEDDING else name: value for name, value in tensors.items()}


def in_dtype(dtype: torch.dtype) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        saved(folder)
        rewritten(folder, lambda tensors: {name: value.to(dtype) for name, value in tensors.items()})

    return make


def norm_in(dtype: torch.dtype) -> Callable[[dict], dict]:
    return lambda tensors: tensors | {"model.norm.weight": torch.ones(32, dtype=dtype)}


def of_bert(folder: Path) -> None:
    """Ties two pairs, of which one is equal in the files."""
    sizes = SIZES | {"num_key_value_heads": None, "is_decoder": True, "tie_word_embeddings": True}
    torch.manual_seed(0)
    transformers.BertLMHeadModel(transformers.BertConfig(**sizes)).save_pretrained(folder)
    decoder = {"cls.predictions.decoder.weight": torch.ones(97, 32)}
    moved = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    rewritten(folder, lambda found: found | decoder | {name: found[of] for name, of in moved.items()})


def of_images(folder: Path) -> None:
    """Its embeddings are tied by the whole model's config, above those of its parts."""
    model = FAMILIES["qwen2_vl"].make(tie_word_embeddings=True)
    model.save_pretrained(folder)
    rewritten(folder, lambda tensors: tensors | {HEAD: torch.ones_like(model.lm_head.weight)})


# And how many parameters have two names after transformers has read it.
FOLDERS = {
    "old parts and their index beside one file": (lambda at: beside_old_parts(at, removed=False), 0),
    "tied, both tensors, that differ": (lambda at: tied(at, head_moved), 0),
}
MORE = {
    "one file": (saved, 0),
    "several files": (several, 0),
    "an old index beside one file": (lambda at: beside_old_parts(at, removed=True), 0),
    "names that are not in the index": (without_names_in_the_index, 0),
    "a file that the config names": (named_by_the_config, 0),
    "the base model alone": (of_the_base_model, 1),
    "tied, the embedding alone": (lambda at: tied(at, dict), 1),
    "tied, the head alone": (lambda at: tied(at, head_alone), 1),
    "tied, GPT-2, that differ": (
        lambda at: tied(at, lambda found: found | {HEAD: found["transformer.wte.weight"] * 2}, family="GPT2"),
        0,
    ),
    "two names for one tensor": (
        lambda at: (saved(at), rewritten(at, lambda found: found | {"norm.weight": torch.full((32,), 7.0)})),
        0,
    ),
    "whole numbers": (lambda at: (saved(at), rewritten(at, norm_in(torch.int64))), 0),
    "bf16": (in_dtype(torch.bfloat16), 0),
    "fp64": (in_dtype(torch.float64), 0),
    "an unknown method of quantisation": (
        lambda at: (saved(at), configured(at, quantization_config={"quant_method": "own"})),
        0,
    ),
    "BERT, one pair of two differs": (of_bert, 1),
    "images, tied, that differ": (of_images, 0),
}


def everything(model: nn.Module) -> dict[str, torch.Tensor]:
    values = dict(full_parameters(model)) if hasattr(model, "unshard") else dict(model.named_parameters())
    names = {id(value): name for name, value in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: values[names[id(value)]].detach().clone() for name, value in every}


def same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor], where: str = "") -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=0, msg=lambda text: f"{where}: {text}")


def ties(model: nn.Module) -> set[frozenset[str]]:
    names: dict[int, set[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(value), set()).add(name)
    return {frozenset(each) for each in names.values() if len(each) > 1}


def plain(folder: Path) -> nn.Module:
    auto = AutoModelForCausalLM
    if json.loads((folder / "config.json").read_text())["model_type"] == "qwen2_vl":
        auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("folders", [FOLDERS, slow(MORE)], ids=["usual", "more"])
def test_values_and_ties_are_transformers(tmp_path: Path, folders: dict) -> None:
    for number, (name, (make, count)) in enumerate(folders.items()):
        at = tmp_path / str(number)
        make(at)
        want = plain(at)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = fully_shard(meta_causal_lm(model=str(at)))
            load_pretrained_shards(model, at)
        wanted = everything(want)
        same(everything(model), wanted, name)
        assert ties(model) == ties(want), name
        assert len(ties(want)) == count, name
        assert [str(each.message) for each in caught if "which differ" in str(each.message)] == [
            f"{at}: the config ties {one} to {other} and the files have both, which differ: they are not tied"
            for one, other in untied(want, at).items()
        ], name
        save_pretrained(model, tmp_path / "out", overwrite=True)
        same(everything(plain(tmp_path / "out")), wanted, f"{name}, written")


def untied(model: nn.Module, folder: Path) -> dict[str, str]:
    """What the folder's config ties and `model` does not."""
    with torch.device("meta"):
        pairs = type(model)(transformers.AutoConfig.from_pretrained(folder)).all_tied_weights_keys
    return {one: other for one, other in pairs.items() if frozenset((one, other)) not in ties(model)}


def test_a_tied_model_does_not_take_two_tensors(tmp_path: Path) -> None:
    tied(tmp_path, head_moved)
    model = fully_shard(causal_lm("Llama", vocab_size=300, tie_word_embeddings=True))
    with pytest.raises(
        CheckpointDiffers, match=rf"{HEAD} and {EMBEDDING} differ, and are one parameter here: make the"
    ):
        load_pretrained_shards(model, tmp_path)


# Names of a layer's experts that the files lack, and what is said of those that are made of them.
EXPERTS = {
    "one of two": (
        "experts.1.w2",
        r"layers.0.mlp.experts.down_proj is \[1, 32, 48\] in the files and \[2, 32, 48\] here",
    ),
    "half of one": ("experts.1.w3", r"layers.0.mlp.experts.gate_up_proj can't be made of .*experts.0.w1.*, … \("),
    "all": ("experts", "layers.0.mlp.experts.gate_up_proj is not in the files; .*down_proj is not in the files"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", EXPERTS)
def test_merged_tensors_are_checked_before_anything_is_overwritten(tmp_path: Path, case: str) -> None:
    missing, said = EXPERTS[case]
    saved(tmp_path, family="Mixtral", num_local_experts=2)
    rewritten(tmp_path, lambda found: {n: found[n] for n in found if "layers.0" not in n or missing not in n})
    model = fully_shard(causal_lm("Mixtral", vocab_size=300, num_local_experts=2))
    before = everything(model)
    with pytest.raises(CheckpointDiffers, match=said):
        load_pretrained_shards(model, tmp_path)
    same(everything(model), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*they are not tied")
def test_a_run_from_two_tensors(tmp_path: Path) -> None:
    """Stopped and continued, exported, and sampled from: with both, as transformers has them."""
    write_case(tmp_path)
    tied(tmp_path / "in", head_moved)
    usual = {"init": None, "model": str(tmp_path / "in"), "steps": 3, "checkpoint_every": 1}
    usual |= {"token_cap": 128, "exact": True}
    runs = {name: case(tmp_path, **usual, out=str(tmp_path / name)) for name in ("whole", "stopped")}
    assert jobs.run(2, runs["whole"]) == [jobs.ENDED]
    assert jobs.run(2, runs["stopped"], stop_after=1) == [jobs.STOPPED]
    assert jobs.run(2, replace(runs["stopped"], resume="auto")) == [jobs.ENDED]
    export(tmp_path / "whole", ExportOptions(out=str(tmp_path / "exported")))
    that_ties = ExportOptions(out=str(tmp_path / "lost"), init=str(tmp_path / "in" / "config.json"))
    with pytest.raises(ValueError, match=r"the head is not tied to the embedding in .*give --model the folder"):
        export(tmp_path / "whole", that_ties)
    want = everything(plain(tmp_path / "whole" / "model"))
    assert (want[HEAD][-1, -1] - want[EMBEDDING][-1, -1]) > 0.9
    assert not torch.equal(want[HEAD], everything(plain(tmp_path / "in"))[HEAD])
    for other in (tmp_path / "stopped" / "model", tmp_path / "exported"):
        same(everything(plain(other)), want, str(other))
    model = fully_shard(meta_causal_lm(model=str(tmp_path / "in")))
    load_pretrained_shards(model, tmp_path / "in")
    options = SamplingOptions(temperature=0.0, max_new_tokens=9, end_tokens=())
    (((one,),)) = TransformersEngine(model).generate([Request(ids=[5, 6, 7], seeds=[0])], options)
    how = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": -1}
    assert one.ids == plain(tmp_path / "in").generate(torch.tensor([[5, 6, 7]]), **how)[0, 3:].tolist()


def adapter(folder: Path, *, beside: bool = False, family: str = "Llama", tied: bool = False, **config: object) -> None:
    """An adapter with values of a model in `folder`/base, `beside`: and that model."""
    import peft

    model = saved(folder / "base", family=family, tie_word_embeddings=tied)
    kind = config.pop("peft_type", "LORA")
    usual = {} if kind == "PROMPT_TUNING" else {"target_modules": ["q_proj", "v_proj"]}
    config = peft.get_peft_config({"peft_type": kind, "task_type": "CAUSAL_LM", **usual, **config})
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), config)
    torch.manual_seed(3)
    for value in wrapped.parameters():
        if value.requires_grad:
            value.data += torch.randn_like(value) / 10
    wrapped.save_pretrained(folder)
    if beside:
        model.save_pretrained(folder)


MERGES = since("5.7", "load_adapter does not say what it did not find")

# PEFT's options, and whether the head is still tied with that adapter.
ADAPTERS = {"of a tied head": ({"tied": True, "target_modules": ["q_proj", "lm_head"]}, False)}
MORE_ADAPTERS = {
    "LoRA": ({"tied": True}, True),
    "beside a model": ({"beside": True, "use_rslora": True}, False),
    "of a tied embedding": ({"tied": True, "target_modules": ["embed_tokens"]}, False),
    "both, kept tied": ({"tied": True, "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, False),
    "tokens": ({"tied": True, "trainable_token_indices": [1, 8]}, True),
    "biases": ({"family": "Qwen2", "bias": "all"}, False),
    "GPT-2": ({"family": "GPT2", "tied": True, "target_modules": ["c_attn"], "fan_in_fan_out": True}, True),
    "experts": ({"family": "Mixtral", "target_modules": ["q_proj"]}, False),
    "IA3": ({"peft_type": "IA3", "feedforward_modules": []}, False),
}


def quantised(folder: Path, dtype: torch.dtype, config: dict | None = None) -> None:
    saved(folder)
    rewritten(
        folder,
        lambda tensors: (
            {name: value.to(dtype) if "_proj" in name else value for name, value in tensors.items()}
            | {f"{name}_scale_inv": torch.ones(1, 1) for name in tensors if "_proj" in name}
        ),
    )
    if config is not None:
        configured(folder, quantization_config=config)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 4 LoRA tensor")  # biases of LoRA
@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # PEFT's, of norms
@MERGES
@pytest.mark.parametrize("rows", [ADAPTERS, slow(MORE_ADAPTERS)], ids=["usual", "more"])
def test_adapters_are_merged(tmp_path: Path, rows: dict, capsys: pytest.CaptureFixture) -> None:
    ids = torch.arange(1, 290, 7)[None]
    for number, (name, (changes, is_tied)) in enumerate(rows.items()):
        at, out = tmp_path / str(number), tmp_path / "out"
        adapter(at, **changes)
        want = AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32)(ids).logits
        model = fully_shard(meta_causal_lm(model=str(at)))
        load_pretrained_shards(model, at)
        assert f"{at} {'has an adapter' if changes.get('beside') else 'is an adapter of'}" in capsys.readouterr().out
        save_pretrained(model, out, overwrite=True)
        found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        # The adapter's product is added to the weight's, not to the weight: in another order.
        torch.testing.assert_close(
            found(ids).logits, want, atol=2e-5, rtol=2e-5, msg=lambda text, at=name: f"{at}: {text}"
        )
        base = AutoModelForCausalLM.from_pretrained(at / "base", dtype=torch.float32)
        assert not torch.allclose(base(ids).logits, want, atol=1e-3), name
        assert bool(ties(found)) == is_tied, name


@pytest.mark.slow
@MERGES
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
def test_a_run_from_an_adapter(tmp_path: Path) -> None:
    """And from its merge by PEFT: the same losses and weights. Resumed only from the same base."""
    import peft

    write_case(tmp_path)
    for name, changes in {"in": {"tied": True, "target_modules": "all-linear"}, "teacher": {"beside": True}}.items():
        adapter(tmp_path / name, **changes)
        whole = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / name).merge_and_unload()
        whole.save_pretrained(tmp_path / f"whole-{name}")
    usual = {"init": None, "steps": 2, "token_cap": 128, "exact": True, "checkpoint_every": 1}
    for name in ("", "whole-"):
        model, teacher = str(tmp_path / f"{name}in"), str(tmp_path / f"{name}teacher")
        run = case(tmp_path, **usual, model=model, teacher=teacher, out=str(tmp_path / f"of-{name}in"))
        assert jobs.run(2, run) == [jobs.ENDED]
    export(tmp_path / "of-in", ExportOptions(out=str(tmp_path / "exported")))
    want = everything(plain(tmp_path / "of-whole-in" / "model"))
    start = everything(plain(tmp_path / "whole-in"))
    assert any((want[key] - value).abs().max() > 1e-4 for key, value in start.items())
    for other in ("of-in/model", "exported"):
        torch.testing.assert_close(everything(plain(tmp_path / other)), want, atol=1e-5, rtol=1e-5)
    of_it = case(tmp_path, **usual, model=str(tmp_path / "in"), out=str(tmp_path / "new"))
    with pytest.raises(ValueError, match="has an adapter, and PEFT can't read one on top of it: begin with"):
        sft.check_before_start(replace(of_it, lora_rank=2), 1)
    before = of_it.identity(2)["contents"]
    saved(tmp_path / "in" / "base", seed=5)
    assert of_it.identity(2)["contents"] != before


def only(name: str, content: bytes = b"") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        saved(folder)
        (folder / SINGLE).unlink()
        (folder / name).write_bytes(content)

    return make


def pickled(folder: Path) -> None:
    torch.save(saved(folder).state_dict(), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def without_a_part(folder: Path) -> None:
    (folder / several(folder)["model.norm.weight"]).unlink()


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
# What is said; and whether transformers reads the folder, also if by the raw values of what is quantised.
REFUSED = {
    "fp8": (
        lambda at: quantised(at, torch.float8_e4m3fn, FP8),
        r"quant_method fp8 in config.json\).* dequantise",
        None if is_older("5.17") else True,
    ),
    "int8, of no config": (lambda at: quantised(at, torch.int8), r"_proj.weight is I8\).* give the model that", None),
}
MORE_REFUSED = {
    "int8": (lambda at: quantised(at, torch.int8, INT8), r"bitsandbytes_8bit in config.json\).*\.dequantize\(\)", None),
    "gptq": (
        lambda at: (saved(at), configured(at, quantization_config={"quant_method": "gptq", "bits": 4})),
        "quant_method gptq",
        False,
    ),
    "a prompt": (
        lambda at: adapter(at, peft_type="PROMPT_TUNING", num_virtual_tokens=3),
        r"an adapter of type PROMPT_TUNING that can't be loaded \(.*\): give .*base, or",
        False,
    ),
    "DoRA, whose magnitudes transformers draws": (lambda at: adapter(at, use_dora=True), "magnitude_vector", True),
    "an adapter without its base": (
        lambda at: (adapter(at), shutil.rmtree(at / "base")),
        "and no model, and adapter_config.json names .*base' .*there is no such file or folder; write the folder",
        False,
    ),
    "an adapter of an adapter": (
        lambda at: (adapter(at), adapter(at / "base"), (at / "base" / "config.json").unlink()),
        "names .*, which is not a model: write the folder of its model there",
        False,
    ),
    "a part is missing": (without_a_part, r"model-0000\d-of-0000\d.safetensors can't be read: No such file", False),
    "no index": (only(INDEX, b"{}"), "is not an index of safetensors: 'weight_map'", False),
    "an index that leaves the folder": (
        only(INDEX, b'{"metadata": {}, "weight_map": {"a": "../a"}}'),
        r"names '\.\./a', which is not a file in its folder",
        False,
    ),
    "GGUF": (only("tiny.gguf"), "has neither .*, only tiny.gguf: it has no weights", False),
    "a pickle": (pickled, "pytorch_model.bin, a pickle, .* convert it once", True),
    "a distributed checkpoint": (
        lambda at: (saved(at), (at / "shard-00000-model-00001-of-00002.safetensors").touch()),
        "shard-00000-model-00001-of-00002.safetensors, a distributed checkpoint's, .* convert it once",
        None,
    ),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
@pytest.mark.parametrize("folders", [REFUSED, slow(MORE_REFUSED)], ids=["usual", "more"])
def test_what_is_refused(tmp_path: Path, folders: dict) -> None:
    """By the check before a run starts: as the model, and as its teacher."""
    start = write_case(tmp_path / "run")
    saved(tmp_path / "model")
    for number, (name, (make, said, is_read)) in enumerate(folders.items()):
        at = tmp_path / str(number)
        make(at)
        for changes in ({"model": str(at)}, {"model": str(tmp_path / "model"), "teacher": str(at)}):
            with pytest.raises((OSError, ValueError), match=said) as caught:
                sft.check_before_start(case(start, init=None, **changes), 1)
            assert "\n" not in str(caught.value), name
        if is_read is not None:
            assert is_read == reads(at), name
        if (way := re.search(r"(AutoModel|peft\.Auto).*\(another_folder\)", str(caught.value))) and is_read:
            remedied(way[0], tmp_path / f"remedied-{number}")


def reads(folder: Path) -> bool:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception:
        return False
    return True


def remedied(code: str, folder: Path) -> None:
    """What a message says to do gives a folder that is read."""
    import peft

    kinds = {"AutoModelForCausalLM": AutoModelForCausalLM, "FineGrainedFP8Config": transformers.FineGrainedFP8Config}
    eval(code, {"torch": torch, "peft": peft, "another_folder": folder, **kinds})
    load_pretrained_shards(fully_shard(meta_causal_lm(model=str(folder))), folder)


def test_random_weights_of_a_quantised_config_are_plain(tmp_path: Path) -> None:
    saved(tmp_path / "in")
    configured(tmp_path / "in", quantization_config=FP8)
    model = fully_shard(meta_causal_lm(init=str(tmp_path / "in" / "config.json")))
    save_pretrained(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    shutil.rmtree(tmp_path / "in")
