"""bitsandbytes' quantised bases under adapters, sharded, by value against one process without them."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import transformers
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from safetensors.torch import save_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.whole import whole
from odc_triton import full_parameters, fully_shard, minibatch, replace_layers
from odc_triton.hf import compute_in_chunks
from tests.support import ranks, slow
from tests.support.families import causal_lm, with_lora
from tests.support.parity import TRANSFORMS, relative
from tests.support.replicas import mesh_of

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # reentrant, without a graph
Seen = dict[str, torch.Tensor]
DEAL = [[0, 1, 3], [2], []]  # the microbatches of each rank

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
FP4 = NF4 | {"bnb_4bit_quant_type": "fp4"}
INT8 = {"load_in_8bit": True}
BF16 = torch.bfloat16
# Rows of q_proj have 64 elements of 40 x 40, those of k_proj 20 x 40: their last block is half.
ODD = {"hidden_size": 40, "intermediate_size": 56}
EVEN = {"hidden_size": 64, "intermediate_size": 128}


def quantised(options: dict[str, Any], family: str = "Qwen2", dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """As users load it: from a folder."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        plain = causal_lm(family, spread=0.1, **sizes).to(dtype)
        plain.config.save_pretrained(folder)
        save_model(plain, f"{folder}/model.safetensors", {"format": "pt"})  # save_pretrained writes on rank 0 only
        config = transformers.BitsAndBytesConfig(**options)
        made = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=dtype, attn_implementation="eager"
        )
    for module in made.modules():
        if isinstance(
            module, bnb.nn.Linear4bit
        ):  # in eval() it would round to bf16, and fails for fewer than 64 columns
            module.support_avx512bf16_for_cpu = False
    return made.train()


def _two_adapters(model: Any) -> Any:
    model.add_adapter("b", model.peft_config["default"])
    model.base_model.set_adapter(["default", "b"])


def _as_qlora(model: Any, reentrant: bool) -> Any:
    from peft import prepare_model_for_kbit_training

    return prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def _embedding_too(model: Any) -> None:
    plain = model.model.embed_tokens
    packed = bnb.nn.EmbeddingNF4(*plain.weight.shape, dtype=torch.float32)
    packed.load_state_dict(plain.state_dict())
    model.set_input_embeddings(packed.to("cpu"))


def _experts(model: Any) -> None:
    for module in [each for each in model.modules() if hasattr(each, "gate_up_proj")]:
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(module, name, compress_statistics=True)


def _biases(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("q_proj.bias"):
            parameter.requires_grad_(True)


def _compile(model: Any) -> None:
    for layer in model.base_model.model.model.layers:
        layer.mlp.compile(backend="aot_eager", dynamic=True)


def _a_forward(model: Any) -> None:
    model(torch.tensor([[3, 4, 5]]))


HALF: dict[str, Any] = {"within": partial(torch.autocast, "cpu", BF16)}
# How the base is loaded, and its changes before and after adapters are added; what is around a forward and backward; options of
# fully_shard, and if layers are sharded before the root.
USAGES: dict[str, dict[str, Any]] = {
    "nf4": {},
    "nf4, single": {"base": NF4 | {"bnb_4bit_use_double_quant": False}},
    "fp4": {"base": FP4},
    "int8": {"base": INT8},
    "int8, outliers": {"base": INT8 | {"llm_int8_threshold": 0.5}},
    "stored as bf16": {"base": NF4 | {"bnb_4bit_quant_storage": BF16}},
    "stored as fp32": {"base": FP4 | {"bnb_4bit_quant_storage": torch.float32}},
    "computes in bf16": {"base": NF4 | {"bnb_4bit_compute_dtype": BF16}},
    "computes in bf16, odd": {"base": NF4 | {"bnb_4bit_compute_dtype": BF16}, "sizes": ODD},
    "odd": {"sizes": ODD},
    "odd, int8": {"sizes": ODD, "base": INT8},
    "odd, stored as bf16": {"sizes": ODD, "base": NF4 | {"bnb_4bit_quant_storage": BF16}},
    "tied": {"family": "Qwen2, tied"},
    "head too": {"base": NF4 | {"llm_int8_skip_modules": []}},
    "experts": {"family": "Qwen3Moe", "before": _experts},
    "experts, checkpointing": {
        "family": "Qwen3Moe",
        "before": lambda model: _experts(model) or TRANSFORMS["checkpointing"](model),
    },
    "embedding": {"before": _embedding_too},
    "checkpointing": {"before": TRANSFORMS["checkpointing"]},
    "reentrant": {"before": TRANSFORMS["reentrant"]},
    "int8, checkpointing": {"base": INT8, "before": TRANSFORMS["checkpointing"]},
    "as PEFT prepares": {"before": partial(_as_qlora, reentrant=False)},
    "as PEFT prepares, reentrant": {"before": partial(_as_qlora, reentrant=True), "base": INT8},
    "compiled": {"after": _compile},
    "int8, compiled": {"after": _compile, "base": INT8},
    "bottom up": {"bottom_up": True},
    "int8, bottom up": {"bottom_up": True, "base": INT8},
    "exact": {"how": {"exact": True}},
    "bf16": {"dtype": BF16},
    "int8, bf16": {"dtype": BF16, "base": INT8},
    "autocast": HALF,
    "int8, autocast": HALF | {"base": INT8},
    "two adapters": {"after": _two_adapters},
    "biases": {"after": _biases},
    "int8, biases": {"after": _biases, "base": INT8},
    "in chunks": {"after": partial(compute_in_chunks, tokens=2)},
    "replaced": {"after": partial(replace_layers, verbose=False, choice="eager/direct/fused")},
    "a forward before": {"after": _a_forward},
    "int8, a forward before": {"after": _a_forward, "base": INT8},
    "a copy": {"after": copy.deepcopy},
    "int8, a copy": {"after": copy.deepcopy, "base": INT8},
    "late": {"how": {"reshard_after_forward": False}},
}
WAYS = {"views": "cpu", "gathered": "cpu-sharded"}


def model_of(name: str) -> Any:
    usage = USAGES[name]
    model = quantised(
        usage.get("base", NF4),
        usage.get("family", "Qwen2"),
        usage.get("dtype", torch.float32),
        **usage.get("sizes", {}),
    )
    lora = partial(with_lora, targets=["q_proj", "v_proj", "down_proj"] if "family" not in usage else ["q_proj"])
    for change in (usage.get("before", id), lora, usage.get("after", id)):
        changed = change(model)
        model = changed if isinstance(changed, nn.Module) else model
    return model


def sharded(name: str, way: str, **how: Any) -> Any:
    model, usage = model_of(name), USAGES[name]
    layers = model.base_model.model.model.layers if "bottom_up" in usage else ()
    for module in (*layers, model):
        fully_shard(module, backend=WAYS[way], **usage.get("how", {}), **how)
    return model


BATCHES = [torch.randint(97, (1, length), generator=torch.Generator().manual_seed(length)) for length in (5, 9, 3, 7)]


def trained(model: Any, name: str, mine: list[int] | None = None) -> tuple[Seen, Seen]:
    """What has to have the same bits: losses; and gradients, of two minibatches. Plainly, of all, if `mine` is None."""
    usage, losses, gradients = USAGES[name], {}, {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def loss_of(each: int) -> torch.Tensor:
        with usage.get("within", nullcontext)():
            return model(BATCHES[each], labels=BATCHES[each], use_cache=False).loss

    def evaluate(when: str) -> None:
        for mode in (torch.inference_mode, torch.no_grad, model.disable_adapter):
            with mode():
                losses[f"{when}, {mode.__name__}"] = loss_of(0).detach().clone()

    evaluate("at first")
    for step in range(2):
        optimizer.zero_grad()
        with nullcontext() if mine is None else minibatch(model, tokens=1):
            for each in range(4) if mine is None else mine:
                loss_of(each).backward()
                if not step:
                    losses[f"of {each}"] = loss_of(each).detach().clone()
        gradients |= {f"{key}, {step}": whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}
    model.eval()
    evaluate("in eval")
    model.train()
    return losses, gradients


def on_ranks(rank: int, world: int, name: str, way: str) -> tuple[Seen, Seen]:
    return trained(sharded(name, way), name, DEAL[rank] if world > 1 else [0, 1, 2, 3])


def compare(name: str, found: list[tuple[Seen, Seen]]) -> None:
    losses, gradients = trained(model_of(name), name)
    for of_rank, gradients_found in found:
        for key, value in of_rank.items():
            assert torch.equal(value, losses[key]), f"{name}, {key}: {value} and not {losses[key]}"
        assert gradients_found.keys() == gradients.keys(), name
        for key, value in gradients.items():
            assert (error := relative(gradients_found[key], value)) <= USAGES[name].get("tolerance", 1e-6), (
                f"{name}, {key}: {error}"
            )
