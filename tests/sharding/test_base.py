"""`fully_shard(base=)`: what a model with a base saves, refuses, and does with the library's other features."""

from __future__ import annotations

import gc
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc_triton import (
    MinibatchFailed,
    enable_split,
    full_parameters,
    fully_shard,
    minibatch,
    offer_policy,
    own_mesh,
    publish,
    register_fsdp_forward_method,
    serving,
)
from odc_triton.balance import count_target_tokens, pack_collate
from odc_triton.checkpoint import load_pretrained_shards, save_pretrained
from odc_triton.checkpoint.base_model import FILE
from odc_triton.checkpoint.folder import load_checkpoint, write_checkpoint
from odc_triton.hf import summed_loss
from odc_triton.nn.replace import replace_layers
from odc_triton.objectives import CrossEntropy, evaluate
from odc_triton.plan.plan import Plan
from tests.support import ranks, slow, splitting
from tests.support.adapters import adapted, adapters, frozen, train
from tests.support.families import causal_lm, with_lora
from tests.support.gradients import gradients_of
from tests.support.models import build, microbatches
from tests.support.parity import packed, whole_model_error
from tests.support.refusals import caught

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _smaller(model: nn.Module) -> nn.Module:
    model.lm_head = nn.Linear(32, 60, bias=False)
    return model


def _with_more(model: nn.Module) -> nn.Module:
    model.more = nn.Linear(3, 3).requires_grad_(False)
    return model


def _with_other_values(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.lm_head.weight.add_(1)  # as PiSSA does
    return model


def _serve(*models: nn.Module) -> None:
    with ExitStack() as scope:
        for model in models:
            scope.enter_context(serving(model))


def _refused(rank: int, world: int) -> list[tuple[str, str]]:
    """(message, what it must have), of each that another one of both must not match."""
    base, quantised = fully_shard(frozen()), fully_shard(packed(build("qwen2")))
    of_one = fully_shard(frozen(), mesh=own_mesh([0])) if rank == 0 else base

    def has(model: nn.Module | None = None, base: Any = base, group: tuple = (rank,), **how: Any) -> nn.Module:
        return fully_shard(model or adapted(), mesh=own_mesh(group), base=base, **how)

    def edit(after: Callable[[nn.Module], object]) -> None:
        model = has()
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1)
        after(model)

    state, ids = adapted().state_dict(), torch.arange(3, 8)[None]
    of_adapters = {key: value for key, value in state.items() if "lora_" in key}
    read, edited = (
        "whose frozen parameters are in a base that other runs read: ",
        "embed_tokens.weight was edited, and is",
    )
    table: list[tuple[Callable[[], object], str]] = [
        (lambda: has(base=fully_shard(build("qwen2"))), r"base trains model.embed_tokens.weight: .* requires_grad_\(F"),
        (lambda: has(base=has()), "base trains .*q_proj.lora_A"),
        (lambda: has(base=frozen()), "Qwen2ForCausalLM is not sharded: call fully_shard"),
        (lambda: has(base="model"), "str is not sharded"),
        (lambda: has(base=of_one, group=(0, 1)), r"ranks \[1\] of the mesh have no part of base: shard it over all"),
        (lambda: has(base=base if rank else None, group=(0, 1)), "rank . and rank . differ: option"),
        (lambda: has(backend="cpu-sharded"), "base is on 'cpu' and this model would be on 'cpu-sharded'"),
        (
            lambda: has(adapted(_smaller)),
            r"head.weight is \[60, 32\] in float32 here and \[97, 32\] in float32 in base",
        ),
        (
            lambda: has(mp_policy=BF16),
            "in bfloat16 here and .* float32 in base: give both models the same folder, quant",
        ),
        (lambda: has(adapted(packed)), "in uint8 here and .* in float32 in base"),
        (lambda: has(base=quantised), "in float32 here and .* in uint8 in base"),
        (lambda: has(adapted(_with_more)), "more.weight is frozen and base, a Qwen2ForCausalLM, has no such parameter"),
        (
            lambda: has(build("qwen2")),
            "embed_tokens.weight trains here, and base has it frozen: freeze it, or train an",
        ),
        (lambda: has(adapted(_with_other_values)), "lm_head.weight has other values here than in base"),
        (lambda: has(adapted(lambda model: model.to("meta"))), "with_adapter in place of get_peft_model"),
        (lambda: has().merge_adapter(), "mesh|DTensor"),
        (lambda: _serve(has()), "serving is for a frozen model, and this one trains"),
        (lambda: own_mesh([1 - rank]), r"own_mesh was given ranks \[.\] on rank .: give each rank those"),
        (lambda: own_mesh([0, 2]), r"ranks is \[0, 2\]; give different numbers from 0 to 1"),
        (lambda: own_mesh([0, 0]), r"ranks is \[0, 0\]; give different"),
        (
            lambda: has().load_state_dict({k: v + 1 for k, v in state.items()}),
            f"_dict with .*weight of .* {read}leave it",
        ),
        (lambda: load_pretrained_shards(has(), "folder"), f"load_pretrained_shards of a model {read}load them into"),
        (lambda: offer_policy(has()), f"offer_policy of a model {read}offer the base"),
        (lambda: edit(lambda model: model(input_ids=ids)), edited),
        (lambda: edit(publish), edited),
        (lambda: edit(lambda model: model.state_dict() and publish(model)), edited),
        (lambda: edit(lambda model: minibatch(model).__enter__()), edited),
        (lambda: has().load_state_dict(of_adapters, strict=False), "nothing was raised"),
    ]
    found = [(caught(action), pattern) for action, pattern in table]
    dist.barrier()
    plain = dict(build("qwen2").named_parameters())
    torch.testing.assert_close(dict(full_parameters(base)), plain, rtol=0, atol=0)
    return found


@pytest.mark.slow
def test_refusals() -> None:
    for found in ranks.run(_refused, 2):
        assert [each for each in found if not re.search(*reversed(each))] == []


def _saved(rank: int, world: int, dtype: torch.dtype, groups: list[list[int]], folder: Path) -> list[bool]:
    """If each model that has loaded the other's checkpoint is as the other."""
    group, policy = next(each for each in groups if rank in each), MixedPrecisionPolicy(param_dtype=dtype)
    base, found, values = fully_shard(frozen().to(dtype)), [], {}

    def made(with_base: bool, name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = adapted(lambda model: model.to(dtype).float(), name=name)  # the values of a folder in `dtype`
        fully_shard(model, mesh=own_mesh(group), base=base if with_base else None, mp_policy=policy)
        return model, torch.optim.AdamW(adapters(model).values(), lr=1e-2)

    def saved(folder: Path, *of: Any, state: dict) -> Path:
        write_checkpoint(folder, model=of[0], optimizer=of[1], state=state, step=2)
        return folder

    with serving(base):
        for with_base in (False, True):
            torch.manual_seed(rank)
            model, optimizer = made(with_base, "some/folder")
            batches = microbatches("qwen2", [6, 9], seed=0)[group.index(rank) :: len(group)]
            train(model, optimizer, batches, lambda model=model: minibatch(model, tokens=1))
            here = saved(folder / f"{group[0]}-{with_base}", model, optimizer, state={"step": 2})
            if rank == group[0]:
                save_pretrained(model, here / "adapter")
            values[here] = {key: each.to_local().clone() for key, each in adapters(model).items()}
        for here, with_base in zip(values, (True, False), strict=True):
            model, optimizer = made(with_base, "another/name")
            assert load_checkpoint(here, model=model, optimizer=optimizer) == {"step": 2}
            found += [torch.equal(each.to_local(), values[here][key]) for key, each in adapters(model).items()]
        # Of a base that can't be found again: what has it can't be loaded into a model that borrows it.
        own, other = made(False, ""), made(True, "")
        paths = [saved(folder / f"{group[0]}-nameless-{each is own}", *each, state={}) for each in (own, other)]
        load_checkpoint(paths[1], model=other[0], optimizer=None)
        found.append("is not in this" in caught(lambda: load_checkpoint(paths[0], model=other[0], optimizer=None)))
    return found


def test_parameters_that_the_base_does_not_shard_stay_this_models() -> None:
    base, model = (nn.Linear(2, 2).requires_grad_(False) for _ in range(2))
    model.load_state_dict(base.state_dict())
    fully_shard(base, ignored_params={base.bias})
    fully_shard(model, base=base, ignored_params={bias := model.bias})
    assert model.bias is bias
    other = nn.Linear(2, 2, device="meta").requires_grad_(False)
    with pytest.raises(ValueError, match=r"^bias is in base's ignored_params: give it in ignored_params here too"):
        fully_shard(other, base=base)


def test_values_are_compared_once_the_base_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2, bias=False).requires_grad_(False)
    base = fully_shard(nn.Linear(2, 2, bias=False).requires_grad_(False))
    publication, wanted = base._odc_engine.publication, model.weight.detach().clone()
    # As an owner that publishes later than this rank.
    monkeypatch.setattr(publication, "wait", lambda: base.weight.to_local().copy_(wanted))
    fully_shard(model, base=base)
    assert torch.equal(model.weight.full_tensor(), wanted)


def test_a_buffer_on_the_meta_device_of_another_shape() -> None:
    base, model = (nn.BatchNorm1d(size, affine=False) for size in (2, 3))
    base.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    fully_shard(base)
    with pytest.raises(ValueError, match=r"running_.* is \[3\] in .*float32 here and \[2\] in .*float32 in base"):
        fully_shard(model.to("meta"), base=base)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


FP32, HALF = torch.float32, torch.bfloat16
SAVED = [(FP32, [[0, 1]]), *(slow(*each) for each in [(HALF, [[0, 1]]), (HALF, [[0], [1]]), (FP32, [[0], [1]])])]


@pytest.mark.parametrize(("dtype", "groups"), SAVED)
def test_files_are_those_without_a_base(dtype: torch.dtype, groups: list[list[int]], tmp_path: Path) -> None:
    for found in ranks.run(_saved, 2, dtype, groups, tmp_path):
        assert len(found) == 17
        assert all(found)
    for group in groups:
        own, other = (_files(tmp_path / f"{group[0]}-{with_base}") for with_base in (False, True))
        assert FILE in own
        assert own.keys() == other.keys()
        assert [name for name in own if own[name] != other[name]] == []


def _split(rank: int, world: int) -> float:
    """A sequence over the two ranks of a group."""
    group, setup = [rank // 2 * 2, rank // 2 * 2 + 1], splitting.Setup()
    base, plain, model = (splitting.build(setup, replaced=False) for _ in range(3))
    plain, model = with_lora(plain), with_lora(model)
    with serving(fully_shard(base.requires_grad_(False))):
        fully_shard(model, mesh=own_mesh(group), base=base)
        enable_split(model, tokens=48)
        _, got = splitting.step_on(model, setup, group.index(rank))
        packs = pack_collate([[each] for each in splitting.samples(setup)])
        for pack in packs:
            (summed_loss(plain, pack) / count_target_tokens(packs)).backward()
        return whole_model_error(got, gradients_of(plain))


def _experts(rank: int, world: int) -> float:
    """Kept copies of other ranks' frozen experts."""
    models = [causal_lm("Mixtral") for _ in range(3)]
    models[1].load_state_dict(models[0].state_dict())
    for each in models[1:]:
        replace_layers(each, roles=["experts"], choice="experts=staged", verbose=False)
    dist.broadcast_object_list(state := [models[0].state_dict()])
    for each in models:
        each.load_state_dict(state[0])
    base = fully_shard(models[2].requires_grad_(False), backend="cpu-sharded")
    plain, model = with_lora(models[0], ["q_proj"]), with_lora(models[1], ["q_proj"])
    ids = torch.arange(3, 14)[None]
    with serving(base):
        fully_shard(model, mesh=own_mesh([rank]), base=base, backend="cpu-sharded", expert_cache_bytes=2**30)
        with minibatch(model, tokens=1):
            for each in (model, plain) * 2:
                each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return whole_model_error(gradients_of(model), gradients_of(plain))


def _dropped(rank: int, world: int) -> float:
    """The name of the base goes before two models that have it; then models in turn leave no memory or files."""
    base, counts, distances = fully_shard(frozen()), [], []
    models = {seed: fully_shard(adapted(seed=seed), mesh=own_mesh([rank]), base=base) for seed in (1, 2)}
    with serving(base):
        for _ in range(12):
            fully_shard(adapted(), mesh=own_mesh([rank]), base=base)
            gc.collect()
            counts.append((len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("memfd:")))
        assert max(counts) <= counts[0]
        del base
        gc.collect()
        for seed, model in models.items():
            plain, ids = adapted(seed=seed), torch.arange(3, 14)[None]
            with minibatch(model, tokens=1):
                for each in (model, plain):
                    each(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            distances.append(whole_model_error(gradients_of(model), gradients_of(plain)))
        return max(distances)


def _blocks_first(rank: int, world: int) -> float:
    """A base whose blocks were sharded before it lends each block its own weights."""
    for block in (base := frozen()).model.layers:
        fully_shard(block)
    model, ids = fully_shard(adapted(), mesh=own_mesh([rank]), base=fully_shard(base)), torch.arange(3, 14)[None]
    with torch.no_grad():
        return float((model(input_ids=ids).logits - adapted()(input_ids=ids).logits).abs().max())


def _beside(rank: int, world: int) -> float:
    """Adapters in ignored_params: what ends oddly on one rank is not another's, and values are always the last ones."""
    model, ids = adapted(seed=rank), torch.arange(3, 14)[None]
    model = fully_shard(model, ignored_params={*adapters(model).values()})
    late = fully_shard(frozen())
    with_lora(late)
    for act in (lambda: minibatch(late).__enter__(), lambda: late(input_ids=ids).logits.mean().backward()):
        assert "lora_A.default.weight was added after fully_shard" in caught(act)
    optimizer = torch.optim.AdamW(model.parameters())  # frozen ones too
    with minibatch(model, tokens=1 + rank) as mb:  # outside of serving as always
        assert mb.tokens == sum(range(world + 1))
    with serving(model), minibatch(model, tokens=1 + rank) as mb:
        assert mb.tokens == 1 + rank
    with serving(model):
        for _ in range(1 + rank):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        failing = model(input_ids=ids).logits
        next(iter(adapters(model).values())).register_hook(lambda _: torch.empty(2**50))
        assert "memory" in caught(failing.mean().backward)
        with minibatch(model):
            model(input_ids=ids)
        with pytest.raises(MinibatchFailed, match=f"rank 0 of {world}, and this is rank 0 of 1 inside of serving"):
            minibatch(model, plan=Plan.by_hand([[] for _ in range(world)]).packs(0), tokens=0).__enter__()
        assert evaluate(model, [], CrossEntropy()).terms == 0
        assert "serving inside of serving" in caught(lambda: _serve(model))
    time.sleep(0.3 * rank)
    state = {key: 2 * each for key, each in adapted().state_dict().items() if "lora_" not in key}
    model.load_state_dict(state, strict=False)
    (plain := adapted()).load_state_dict(state | adapters(model), strict=False)
    with minibatch(model), torch.no_grad():  # the others may be late
        distance = (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max()
        dist.barrier()
    return float(distance)


def _generates(rank: int, world: int) -> float:
    """Over a base and beside one, more often on higher ranks."""
    model, beside, ids, apart = adapted(), adapted(), torch.arange(3, 14)[None], 0.0
    how: dict[str, Any] = {"input_ids": ids, "max_new_tokens": 5, "do_sample": False}
    want, base = adapted().generate(**how), fully_shard(frozen())
    fully_shard(beside, ignored_params={*adapters(beside).values()})
    with serving(base), serving(beside), torch.no_grad():
        for each in (fully_shard(model, mesh=own_mesh([rank]), base=base), beside):
            register_fsdp_forward_method(each, "generate")
            for _ in range(1 + rank):
                apart += float((each.generate(**how) != want).sum())
    return apart


def _own_adapters(rank: int, world: int) -> float:
    """Each rank writes those that it has in ignored_params."""
    model = fully_shard(own := adapted(seed=rank), ignored_params={*adapters(own).values()})
    with serving(model), tempfile.TemporaryDirectory() as folder:
        save_pretrained(model, f"{folder}/adapter")
        saved = load_file(f"{folder}/adapter/adapter_model.safetensors")
    values = {key.replace(".default", ""): each for key, each in adapters(adapted(seed=rank)).items()}
    return whole_model_error(saved, values)


@pytest.mark.parametrize(
    "use", [_beside, *map(slow, (_blocks_first, _generates, _own_adapters, _split, _experts, _dropped))]
)
def test_uses(use: Callable[[int, int], float]) -> None:
    assert max(ranks.run(use, 4)) <= 1e-6
