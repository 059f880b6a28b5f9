"""What users do with a mixture whose experts are layers, by value against one process without them."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from bench.whole import whole
from odc_triton import full_parameters, fully_shard, minibatch, repeating, replace_layers
from odc_triton.base.errors import MinibatchFailed
from odc_triton.hf import compute_in_chunks
from odc_triton.nn.replace import restore_layers
from tests.nn.test_experts import BATCHES, FEW, LOTS, STAGED, _loss
from tests.support import ranks, slow
from tests.support.families import causal_lm, with_lora
from tests.support.parity import TRANSFORMS, relative

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # reentrant, without a graph
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # compiled
]
Seen = dict[str, torch.Tensor]
DEAL, OTHER_DEAL = [[0, 1, 3], [2]], [[2], [3, 1, 0]]  # the microbatches of two ranks


def _give_no_tokens(model: Any) -> None:
    """To the second layer's, of a microbatch of one token."""
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(lambda _, given: tuple(each[: len(each) * (len(each) > 1)] for each in given))
    experts.register_forward_hook(lambda _, __, y: y if len(y) else y.sum() + y.new_zeros(1, 32))


def _see_embeddings(model: Any) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _, __, output: setattr(model, "seen", output))


def _add_norm_of_gradient(model: Any, loss: torch.Tensor) -> torch.Tensor:
    return loss + torch.autograd.grad(loss, model.seen, create_graph=True)[0].square().sum()


_lora = partial(with_lora, targets=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"])


def _two_adapters(model: Any) -> Any:
    model = _lora(model)
    model.add_adapter("b", model.peft_config["default"])
    model.base_model.set_adapter(["default", "b"])
    return model


FP32: dict[str, Any] = {"dtype": torch.float32, "tolerance": 1e-5}  # sums in another order
HALF: dict[str, Any] = {"dtype": torch.float32, "tolerance": 5e-2}  # numbers of 8 bits
# What is changed before and after layers are replaced; what is around a forward and backward; the family; what the loss
# becomes, and its factor in the second minibatch; options of fully_shard, and if layers are sharded before the root.
USAGES: dict[str, dict[str, Any]] = {
    "alone": {},
    "bottom up": {"bottom_up": True},
    "a copy": {"after": copy.deepcopy},
    "restored": {"after": restore_layers},
    "checkpointing": {"before": TRANSFORMS["checkpointing"]},
    "reentrant": {"before": TRANSFORMS["reentrant"]},
    "in chunks": {"after": partial(compute_in_chunks, tokens=2)},
    "one frozen": {"before": lambda model: model.model.layers[0].mlp.experts.down_proj.requires_grad_(False)},
    "no tokens": {"before": _give_no_tokens},
    "second derivatives": {"before": _see_embeddings, "loss": _add_norm_of_gradient},
    "compiled": {"after": lambda model: [layer.compile(backend="aot_eager") for layer in model.model.layers]},
    "biases": {"family": "GptOss"},
    "fp32": FP32,
    "exact": {"how": {"exact": True}} | FP32,
    "repeated": {"how": {"exact": True}, "factor": 2.0**12} | FP32,  # exact, and larger than was expected
    "autocast": {"within": partial(torch.autocast, "cpu", torch.bfloat16)} | HALF,
    "bf16": {"how": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}} | HALF,
    "LoRA": {"before": _lora},
    "LoRA, transposed": {"before": _lora, "family": "GptOss"},
    "LoRA, later": {"after": _lora} | FP32,
    "LoRA, replaced again": {"before": _lora, "after": partial(replace_layers, roles=["experts"], verbose=False)},
    "LoRA, two": {"before": _two_adapters},
    "LoRA, two, later, transposed": {"after": _two_adapters, "family": "GptOss"},
    "LoRA, merged": {"before": lambda model: _lora(model).merge_and_unload().requires_grad_(True)},
}
EAGER = ["views", "apart", "kept", "some kept"]
WAYS = {
    "views": ("cpu", "auto", 0),
    "apart": ("cpu-sharded", STAGED, 0),
    "kept": ("cpu-sharded", STAGED, LOTS),
    "some kept": ("cpu-sharded", STAGED, FEW),
    "whole": ("cpu-sharded", "experts=gathered/whole", 0),
    "kernels": ("cpu-interpreter", "experts=triton/direct", LOTS),
    "staged kernels": ("cpu-interpreter", "experts=triton/staged", FEW),
    "without": ("cpu", "", 0),
}


def model_of(name: str, choice: str = "") -> Any:
    torch.manual_seed(0)
    model, usage = causal_lm(USAGES[name].get("family", "Mixtral"), spread=0.1), USAGES[name]
    model.set_experts_implementation("eager")  # others take no fp64
    replace = partial(replace_layers, roles=["experts"], choice=choice, verbose=False)
    for change in (usage.get("before", id), replace if choice else id, usage.get("after", id)):
        changed = change(model)
        model = changed if isinstance(changed, nn.Module) else model
    return model.to(usage.get("dtype", torch.float64))


def sharded(name: str, way: str) -> Any:
    (backend, choice, cache_bytes), usage = WAYS[way], USAGES[name]
    model = model_of(name, choice)
    for module in (*(model.model.layers if "bottom_up" in usage else ()), model):
        fully_shard(module, backend=backend, expert_cache_bytes=cache_bytes, **usage.get("how", {}))
    return model


def trained(model: Any, name: str, mine: list[int] | None = None) -> Seen:
    """Gradients of two minibatches, losses before and after the step, weights; plainly, of all, if `mine` is None."""
    optimizer, usage, seen = torch.optim.SGD(model.parameters(), lr=1e-3), USAGES[name], {}

    def run(factor: float) -> None:
        with nullcontext() if mine is None else minibatch(model, tokens=27):
            for each in range(4) if mine is None else mine:
                with usage.get("within", nullcontext)():
                    (usage.get("loss", lambda _, loss: loss)(model, _loss(model, BATCHES[each])) * factor).backward()

    def evaluate(when: str) -> None:
        mode = torch.inference_mode if "step" not in when else torch.no_grad
        with mode(), usage.get("within", nullcontext)():
            seen[f"loss {when}"] = _loss(model, BATCHES[0])

    evaluate("at first")
    for step in range(2):
        optimizer.zero_grad()
        repeating(partial(run, usage.get("factor", 1.0) ** step))
        evaluate(f"before step {step}")
        seen |= {f"{key}, {step}": whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}
        optimizer.step()  # after all ranks have evaluated
        evaluate(f"after step {step}")
    return seen | {key: p.clone() for key, p in (model.named_parameters() if mine is None else full_parameters(model))}


def on_ranks(rank: int, world: int, name: str, way: str, deal: list[list[int]] = DEAL) -> Seen:
    return trained(sharded(name, way), name, deal[rank])


def compare(name: str, found: Seen, want: Seen, at_most: float = 1.0) -> None:
    assert found.keys() == want.keys(), name
    for key, value in want.items():
        assert (error := relative(found[key], value)) <= min(at_most, USAGES[name].get("tolerance", 1e-10)), (
            f"{name}, {key}: {error}"
        )


RUNS = {way: [(name, way) for name in USAGES if name != "bf16"] for way in EAGER}
RUNS["whole"] = [(name, "whole") for name, usage in USAGES.items() if "dtype" not in usage]
RUNS["kernels"] = [(name, way) for name in ("fp32", "exact") for way in ("kernels", "staged kernels")]
SOME = [("alone", "kept"), ("LoRA, later", "some kept"), ("no tokens", "apart")]


@pytest.mark.parametrize("runs", [SOME, *map(slow, RUNS.values())], ids=["some", *RUNS])
def test_as_without_it(runs: list[tuple[str, str]]) -> None:
    for (name, _), (first, second) in zip(runs, ranks.run_all(2, *((on_ranks, *run) for run in runs)), strict=True):
        compare(name, first, trained(model_of(name), name))
        compare(name, second, first)


@pytest.mark.parametrize(
    ("name", "ways", "tolerance"),
    [("repeated", ["views", "kept"], 0), slow("exact", EAGER, 0), slow("bf16", ["without", *EAGER], 1)],
)
def test_as_each_other(name: str, ways: list[str], tolerance: float) -> None:
    """However much is kept, and whoever computes what. (In bf16 a plain model's routers would choose other experts.)"""
    runs = [(way, deal) for way in ways for deal in (DEAL, OTHER_DEAL)]
    (want, _), *others = ranks.run_all(2, *((on_ranks, name, *run) for run in runs))
    for found in (found for of_ranks in others for found in of_ranks):
        compare(name, found, want, tolerance)


def _after(rank: int, world: int, fault: str, way: str) -> tuple[str, Seen]:
    """What the minibatch raised, or gave, in which rank 1 has a fault; what is seen after it."""
    model, error = sharded("exact", way), ""
    try:
        with minibatch(model, tokens=27):
            (_loss(model, BATCHES[rank]) * (math.nan if fault == "NaN" and rank else 1)).backward()
            assert fault == "NaN" or not rank, "no luck"
    except MinibatchFailed as raised:
        error = str(raised)
    nans = [whole(p.grad).isnan().all().item() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return error or f"NaN: {sum(nans)} of {len(nans)}", trained(model, "exact", DEAL[rank])


@pytest.mark.parametrize("way", ["kept", slow("kernels")])
def test_a_lost_minibatch_leaves_nothing(way: str) -> None:
    want, faults = trained(model_of("exact"), "exact"), {"raises": "rank 1: AssertionError: no luck", "NaN": "21 of 21"}
    found = ranks.run_all(2, *((_after, fault, way) for fault in faults))
    for said, (error, seen) in ((said, each) for said, of in zip(faults.values(), found, strict=True) for each in of):
        assert said in error
        compare("exact", seen, want)
