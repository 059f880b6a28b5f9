"""bitsandbytes' quantised bases under adapters, sharded, by value against one process without them."""

from __future__ import annotations

import copy
import gc
import re
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from bitsandbytes import functional
from bitsandbytes.functional import has_avx512bf16
from bitsandbytes.nn import Int8Params, Params4bit
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from safetensors.torch import save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.parametrize import is_parametrized

from bench.whole import whole
from odc_triton import full_parameters, fully_shard, minibatch, replace_layers
from odc_triton.engine.api import engine_of
from odc_triton.hf import compute_in_chunks, enable_packing
from odc_triton.nn.operand import kept_dtype
from odc_triton.nn.packed import packed_state, prepare
from odc_triton.nn.verification import verify
from tests.support import ranks, slow, splitting
from tests.support.families import causal_lm, with_lora
from tests.support.parity import TRANSFORMS, packed, relative
from tests.support.refusals import caught
from tests.support.replicas import mesh_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # reentrant, without a graph
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),  # by PEFT
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # compiled
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
Seen = dict[str, torch.Tensor]
BATCHES = [torch.arange(3, 3 + length)[None] * length % 97 for length in (5, 9, 3, 7)]
DEAL = [[0, 1, 3], [2], []]  # the microbatches of each rank
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
SINGLE = NF4 | {"bnb_4bit_use_double_quant": False}
INT8 = {"load_in_8bit": True}
BF16 = torch.bfloat16
# Rows of q_proj have 64 elements of 40 x 40, those of k_proj 20 x 40: their last block is half.
ODD = {"hidden_size": 40, "intermediate_size": 56}


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
    for module in made.modules():  # in eval() they would round scales, and fail for fewer than 64 columns
        vars(module).update({"support_avx512bf16_for_cpu": False})
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
    """Trained, with values of bf16: bitsandbytes casts them for good."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias") and parameter.dtype == torch.float32:
            parameter.data.copy_(parameter.to(BF16))
            parameter.requires_grad_(name.endswith(("v_proj.base_layer.bias", "c_fc.bias", "o_proj.bias")))


def _compile(model: Any) -> None:
    for layer in model.base_model.model.model.layers:
        layer.mlp.compile(backend="aot_eager", dynamic=True)


def _halve(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.dtype == torch.float32:
            parameter.data = parameter.data.to(BF16)


HALF: dict[str, Any] = {"within": partial(torch.autocast, "cpu", BF16)}
# How the base is loaded, and its changes before and after adapters are added; what is around a forward and backward;
# options of fully_shard, and if layers are sharded before the root; what gradients may differ by, if not by 1e-6: they
# are sums in another order; and losses, if they may: a replaced head adds in another order.
USAGES: dict[str, dict[str, Any]] = {
    "nf4": {},
    "single": {"base": SINGLE},
    "fp4": {"base": NF4 | {"bnb_4bit_quant_type": "fp4"}},
    "outliers": {"base": INT8 | {"llm_int8_threshold": 0.5}},
    "stored as bf16, odd": {"base": NF4 | {"bnb_4bit_quant_storage": BF16}, "sizes": ODD},
    "stored as fp32": {"base": SINGLE | {"bnb_4bit_quant_storage": torch.float32}},
    "computes in bf16": {"base": NF4 | {"bnb_4bit_compute_dtype": BF16}},
    "odd": {"sizes": ODD},
    "tied": {"family": "Qwen2, tied"},
    "head too": {"base": NF4 | {"llm_int8_skip_modules": []}},
    "experts": {"family": "Qwen3Moe", "before": _experts},
    "experts, checkpointing": {"family": "Qwen3Moe", "before": _experts, "after": TRANSFORMS["checkpointing"]},
    "embedding": {"before": _embedding_too},
    "embedding of whole blocks": {"before": _embedding_too, "sizes": {"hidden_size": 64}},
    "checkpointing": {"before": TRANSFORMS["checkpointing"]},
    "reentrant": {"before": TRANSFORMS["reentrant"]},
    "as PEFT prepares": {"before": partial(_as_qlora, reentrant=False)},
    "as PEFT prepares, reentrant": {"before": partial(_as_qlora, reentrant=True)},
    "compiled": {"after": _compile},
    "bottom up": {"bottom_up": True},
    "exact": {"how": {"exact": True}},
    "bf16": {"dtype": BF16},
    "mp_policy": {"how": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, "plain": _halve, "tolerance": 2e-2},
    "autocast": HALF,
    "two adapters": {"after": _two_adapters},
    "biases": {"after": _biases},
    "biases, autocast": HALF | {"after": _biases, "family": "Starcoder2", "tolerance": 2e-2},
    "in chunks": {"after": partial(compute_in_chunks, tokens=2)},
    "replaced": {"after": partial(replace_layers, verbose=False), "tolerance": 2e-6, "rounds": 1e-6},
    "a forward before": {"after": lambda model: model(BATCHES[0]) and None},
    "a copy": {"after": copy.deepcopy},
    "not resharded": {"how": {"reshard_after_forward": False}},
    "replicas": {"replicas": True},
}
OF_BOTH = {
    key: each for key, each in USAGES.items() if not {"base", "plain"} & each.keys() and key[:3] not in ("exp", "emb")
}
USAGES |= {f"int8, {key}": usage | {"base": INT8} for key, usage in OF_BOTH.items()}
WAYS = {"views": "cpu", "gathered": "cpu-sharded"}


def model_of(name: str) -> Any:
    usage = USAGES[name]
    model = quantised(
        usage.get("base", NF4),
        usage.get("family", "Qwen2"),
        usage.get("dtype", torch.float32),
        **usage.get("sizes", {}),
    )
    targets = ["q_proj", "v_proj", "down_proj"] if "family" not in usage else ["q_proj"]
    lora = partial(with_lora, targets=targets, **usage.get("adapted", {}))
    for change in (usage.get("before", id), lora, usage.get("after", id)):
        changed = change(model)
        model = changed if isinstance(changed, nn.Module) else model
    return model


def sharded(name: str, way: str) -> Any:
    model, usage = model_of(name), USAGES[name]
    mesh = mesh_of((2, 1)) if "replicas" in usage else None
    layers = model.base_model.model.model.layers if "bottom_up" in usage else ()
    for module in (*layers, model):
        fully_shard(module, backend=WAYS[way], mesh=mesh, **usage.get("how", {}))
    return model


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
    plain = model_of(name)
    USAGES[name].get("plain", id)(plain)
    losses, gradients = trained(plain, name)
    for of_rank, theirs in found:
        for key, value in of_rank.items():
            assert relative(value, losses[key]) <= USAGES[name].get("rounds", 0), f"{name}, {key}: {value}"
        assert theirs.keys() == gradients.keys(), name
        for key, value in gradients.items():
            error = relative(theirs[key], value)
            assert error <= USAGES[name].get("tolerance", 1e-6), f"{name}, {key}: {error}"


RUNS = {way: (2, [(name, way) for name in USAGES]) for way in WAYS}
RUNS |= {f"{world} ranks": (world, [(name, "gathered") for name in ("nf4", "odd", "int8, odd")]) for world in (1, 3)}
SOME = (2, [("odd", "gathered"), ("int8, bottom up", "gathered")])


@pytest.mark.parametrize(("world", "runs"), [SOME, *(slow(*each) for each in RUNS.values())], ids=["some", *RUNS])
def test_as_bitsandbytes(world: int, runs: list[tuple[str, str]]) -> None:
    for (name, _), found in zip(runs, ranks.run_all(world, *((on_ranks, *run) for run in runs)), strict=True):
        compare(name, found)


def _split(rank: int, world: int, setup: splitting.Setup) -> Seen:
    return splitting.run(rank, world, setup)[1]


@pytest.mark.slow
@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("change", ["", "+checkpointing", "+chunks", "+layers"])
def test_split_sequences_and_shared_prefixes(base: str, change: str) -> None:
    for deal in ("two", "cut tree"):
        prefix = 8 if "tree" in deal else 0
        setup = splitting.Setup(deal=deal, change=f"{base}+lora{change}", backend="cpu-sharded", prefix=prefix)
        for found in ranks.run(_split, len(splitting.DEALS[deal]), setup):
            splitting.require_plain(found, setup, 2e-6)


def test_probes_leave_the_codes_alone() -> None:
    """In evaluation some CPUs pack them once more, and round the scales."""
    model = packed(causal_lm("Qwen2", hidden_size=64, intermediate_size=128))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    enable_packing(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.model.layers[0].mlp.up_proj.support_avx512bf16_for_cpu == has_avx512bf16()


@pytest.mark.parametrize("name", ["nf4", slow("int8, nf4"), slow("experts")])
def test_replaced_layers_leave_them(name: str) -> None:
    model = model_of(name)
    replaced = replace_layers(model, roles=["attention", "head", "embedding", "experts", "linear"], verbose=False)
    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    names = {key for key, each in model.named_modules() if isinstance(each, kinds) or is_parametrized(each)}
    assert names <= replaced.left.keys()
    assert replaced.swapped["linear"]  # adapters
    verify(model, {"input_ids": BATCHES[0], "labels": BATCHES[0]})


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)  # codes stored as floats may be NaN


def _state(rank: int, world: int, name: str, folder: str, save: bool) -> dict[str, Any]:
    """Saves the model, or loads it after all its parameters were cleared; each way that users have."""
    model = sharded(name, "gathered")
    want = {key: _bits(value.clone()) for key, value in full_parameters(model)}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    ways: dict[str, Callable[[dict], Any]] = {
        "full": lambda _: model.load_state_dict(full),
        "DCP": lambda state: (dcp.load(state, checkpoint_id=folder), set_model_state_dict(model, state)),
    }
    if save:
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    found: dict[str, Any] = {"names": want.keys() ^ model.state_dict().keys() | want.keys() ^ full.keys()}
    for way, load in ways.items() if not save else ():
        for parameter in model.parameters():
            parameter.data.to_local().zero_()
        load(get_model_state_dict(model))
        dist.barrier()
        found[way] = [key for key, value in full_parameters(model) if not torch.equal(_bits(value), want[key])]
        dist.barrier()
    model.unshard()
    found["generated"] = model.generate(input_ids=BATCHES[0], max_new_tokens=4, do_sample=False)
    return found


OTHERS = map(slow, ("stored as bf16, odd", "experts", "embedding", "int8, bottom up"))


@pytest.mark.parametrize("name", [slow("int8, odd"), *OTHERS])
def test_state_dicts(name: str, tmp_path: Path) -> None:
    """Written by two ranks and read by three."""
    generated = model_of(name).generate(input_ids=BATCHES[0], max_new_tokens=4, do_sample=False)
    for world, save in ((2, True), (3, False)):
        for found in ranks.run(_state, world, name, str(tmp_path / "saved"), save):
            assert found.pop("generated").equal(generated)
            assert not any(found.values()), found


def _bytes(rank: int, world: int, options: dict[str, Any]) -> tuple[float, float, int]:
    """Bytes that a rank reads of a packed weight, and holds; and those of full copies after a step."""
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 1, "num_attention_heads": 14}
    model = with_lora(quantised(options, dtype=BF16, **sizes), ["q_proj"])
    prepare(model)
    weights = sum(each.in_features * each.out_features for each in model.modules() if packed_state(each) is not None)
    fully_shard(model, backend="cpu-sharded")
    with minibatch(model, tokens=1):
        model(BATCHES[0], labels=BATCHES[0]).loss.backward()
    frozen = [each for each in engine_of(model).parameters if kept_dtype(each.leaf) is not None]
    kinds = {(each.dtype, each.leaf.numel()) for each in frozen if each.leaf.numel() > 16}
    trained = [
        each for each in engine_of(model).parameters if each.trains
    ]  # whose shards and gradients may be as large
    kinds -= {(of.dtype, each.numel()) for of in trained for each in (of.leaf, of.sharded.to_local())}
    heap = {each.untyped_storage().data_ptr() for of in frozen for each in of.shard.compute_shards}
    theirs = {id(value) for value in functional.name2qmap.values()}  # bitsandbytes' own
    held = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter, Params4bit, Int8Params)]
    full = [each for each in held if (each.dtype, each.numel()) in kinds and id(each) not in theirs]
    storages = {each.untyped_storage().data_ptr(): each.nbytes for each in full if each.untyped_storage().size()}
    copies = sum(nbytes for at, nbytes in storages.items() if at not in heap)
    own = sum(each.sharded.to_local().nbytes for each in frozen)
    return sum(each.leaf.nbytes for each in frozen) / weights, own / weights, copies


@pytest.mark.parametrize(("options", "most"), [slow(NF4, 0.52), slow(SINGLE, 0.57), slow(INT8, 1.01)])
def test_bytes(options: dict[str, Any], most: float) -> None:
    for read, own, copies in ranks.run(_bytes, 2, options):
        assert read <= most
        assert own <= most / 2 + 1e-3
        assert copies == 0


class _Hiding(nn.Module):
    """Its blocks hide their outputs, so their units don't see when a backward comes."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        packed(self, bits)
        self.trained = nn.Linear(64, 64)
        for layer in self.layers:
            layer.register_forward_hook(lambda _, __, y: [lambda: y])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](self.trained(x))[0]())[0]()


def _packed_anew() -> nn.Module:
    model = packed(causal_lm("Qwen2"))
    model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True  # as on some CPUs
    return model


def _torchao() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64))
    quantize_(model, Int8WeightOnlyConfig())
    return model


def _backward(bits: int) -> None:
    model = fully_shard(_Hiding(bits), backend="cpu-sharded")
    with minibatch(model, tokens=1):
        model(torch.ones(3, 64)).sum().backward()


FREED = "RuntimeError: a quantised layer's weights were read after its unit had freed them"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "not quantised": (lambda: fully_shard(bnb.nn.Linear4bit(64, 64)), "ValueError: weight is not quantised yet"),
    "not quantised, int8": (lambda: fully_shard(bnb.nn.Linear8bitLt(64, 64)), "ValueError: weight is torch.float32"),
    "packed anew": (
        lambda: fully_shard(_packed_anew()),
        r"up_proj.weight was repacked for CPU inference, by a forward in eval",
    ),
    "torchao": (lambda: fully_shard(_torchao()), "ValueError: 0.weight is .*a tensor subclass.* by bitsandbytes"),
    "hidden": (partial(_backward, 4), FREED),
    "hidden, int8": (partial(_backward, 8), FREED),
}
if find_spec("torchao") is None:
    del REFUSED["torchao"]


def _refusals(rank: int, world: int) -> dict[str, str]:
    return {name: caught(action) for name, (action, _) in REFUSED.items()}


def test_refused() -> None:
    for found in ranks.run(_refusals, 2):
        for name, (_, words) in REFUSED.items():
            assert re.search(words, found[name]), f"{name}: {found[name]}"
