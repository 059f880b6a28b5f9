"""The plan against brute force, FSDP2's shards and states, and the tensors that autograd really saves."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from odc_triton import enable_split, fully_shard, minibatch, own_mesh, replace_layers
from odc_triton.engine.api import engine_of
from odc_triton.hf import enable_packing
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.tools.memory.footprint import OPTIMIZERS, SCHEMES, memory_plan, side_by_side
from odc_triton.tools.memory.traced import LiveBytes, _traced
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.versions import RECURRENT

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def bag(*parameters: tuple[tuple[int, ...], torch.dtype, bool], device: str = "cpu") -> nn.Module:
    """A module without blocks that holds parameters of the given shapes, dtypes and requires_grad."""
    module = nn.Module()
    for index, (shape, dtype, trainable) in enumerate(parameters):
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        module.register_parameter(f"p{index}", nn.Parameter(tensor, requires_grad=trainable))
    return module


def blocks(*sizes: int, root: int) -> nn.Module:
    """A root parameter and one block per size, all fp32 vectors."""
    model = bag(((root,), torch.float32, True))
    model.blocks = nn.ModuleList(bag(((size,), torch.float32, True)) for size in sizes)
    return model


WIDE: dict[str, Any] = {"attention": None, "hidden_size": 64, "intermediate_size": 160}


def qwen2(layers: int = 2, **options: Any) -> nn.Module:
    return causal_lm("Qwen2", **WIDE | {"vocab_size": 256, "num_hidden_layers": layers} | options)


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
parameter_lists = st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), min_size=1, max_size=6)


@given(
    parameters=parameter_lists,
    world=st.integers(1, 7),
    param_dtype=st.sampled_from((None, *DTYPES)),
    reduce_dtype=st.sampled_from((None, torch.float32, torch.bfloat16)),
    optimizer=st.sampled_from(OPTIMIZERS),
    backend=st.sampled_from(("cpu", "cuda")),
)
@settings(max_examples=200)
def test_bytes_are_those_of_laying_out_every_shard(parameters, world, param_dtype, reduce_dtype, optimizer, backend):
    """Each shard is made on meta by torch.chunk and put at the next multiple of 128 bytes of a region."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    plan = memory_plan(bag(*parameters), world, mp_policy=policy, optimizer=optimizer, backend=backend)
    compute = gradient = master = states = cast = 0
    regions = {"own": 0, "whole": 0}

    def place(region: str, n_bytes: int) -> None:
        regions[region] = (regions[region] + 127) // 128 * 128 + n_bytes

    for kind in ("compute", "gradient"):
        for shape, dtype, trainable in parameters:
            whole = torch.empty(shape or (1,), dtype=dtype, device="meta")
            shard = whole.chunk(world)[0]
            cast_to = param_dtype or dtype
            if kind == "compute":
                place("own", shard.to(cast_to).nbytes)
                place("whole", whole.to(cast_to).nbytes)
                compute += shard.to(cast_to).nbytes
                master += shard.nbytes if cast_to != dtype else 0
            elif trainable:
                sum_in = reduce_dtype or (torch.float64 if dtype == torch.float64 else torch.float32)
                place("own", shard.to(sum_in).nbytes)
                place("whole", whole.to(sum_in).nbytes)
                gradient += shard.to(sum_in).nbytes
                cast += shard.nbytes if sum_in != dtype else 0
                states += 2 * shard.nbytes + 4 if optimizer in ("adamw", "muon") else 0  # no blocks
                if optimizer == "adamw-8bit":
                    one = 4 * shard.numel() if whole.numel() < 4096 else shard.numel() + 4 * -(-shard.numel() // 256)
                    states += 2 * one + 4
    if backend == "cpu":
        assert (plan.compute_shard_bytes, plan.gradient_shard_bytes) == (compute, gradient)
        assert plan.job_shared_bytes == regions["whole"]
    else:
        # The region itself ends on a multiple of the alignment.
        assert regions["own"] <= plan.shared_bytes < regions["own"] + 128
        assert plan.shared_bytes % 128 == 0
        assert plan.job_shared_bytes == world * plan.shared_bytes
    assert plan.master_shard_bytes == master
    assert plan.optimizer_state_bytes == states
    assert plan.gradient_cast_bytes == cast
    assert plan.parameters == sum(torch.Size(shape).numel() for shape, _, _ in parameters)


def test_tied_parameters_count_once():
    tied, untied = (qwen2(vocab_size=1024, tie_word_embeddings=tie) for tie in (True, False))
    embedding_bytes = 1024 * 64 * 4
    a, b = (memory_plan(each, 2, backend="cpu") for each in (tied, untied))
    assert b.parameters - a.parameters == 1024 * 64
    assert b.job_shared_bytes - a.job_shared_bytes == 2 * embedding_bytes
    # Tied: the head's part waits until the embedding's is made. Untied: both are of the root's unit. And a norm.
    assert a.transient_gradient_bytes == b.transient_gradient_bytes == 2 * embedding_bytes + 64 * 4


def frozen(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9)).to(dtype).requires_grad_(False)
    model[0].register_buffer("table", torch.zeros(3))
    return model


def _over_one_base(rank: int, world: int, run_ranks: int) -> dict[str, int]:
    base, place = fully_shard(frozen(torch.bfloat16)), rank % run_ranks
    mesh = own_mesh(range(rank - place, rank - place + run_ranks))
    model = fully_shard(nn.Sequential(*frozen(torch.float32), nn.Linear(9, 3)), mesh=mesh, mp_policy=BF16, base=base)
    own, lent = engine_of(model), engine_of(base)
    ours, theirs = ([p.shard for p in each.parameters if p.shard.heap is each.heap] for each in (own, lent))
    tensors = {
        "compute_shard_bytes": [s.compute_shards[n] for n, of in ((place, ours), (rank, theirs)) for s in of],
        "gradient_shard_bytes": [each.gradient_shard for each in ours],
        "master_shard_bytes": [each.master for each in (*ours, *theirs) if each.spec.has_own_master],
        "buffer_bytes": [*base.buffers(), *model.buffers()],
    }
    lent_bytes, own_bytes = (each.heap.size_bytes - each.heap._data_offset for each in (lent, own))
    found = {name: sum(each.nbytes for each in of) for name, of in tensors.items()}
    return found | {"job_shared_bytes": lent_bytes + world // run_ranks * own_bytes}


@pytest.mark.parametrize(("world", "run_ranks"), [(2, 1), slow(4, 2)])
def test_runs_over_one_base_have_its_shards_and_their_own_adapters(world: int, run_ranks: int) -> None:
    model = nn.Sequential(*frozen(torch.float32), nn.Linear(9, 3))
    plan = memory_plan(model, world, run_ranks=run_ranks, mp_policy=BF16, backend="cpu")
    found = ranks.run(_over_one_base, world, run_ranks)[0]
    assert {name: getattr(plan, name) for name in found} == found
    assert plan.optimizer_state_bytes == 2 * found["master_shard_bytes"] + 2 * 4


def test_unsharded_parameters_and_gradients_per_unit():
    """Units of 100 (root), 10, 30, 20 elements: bf16 compute, fp32 sums, 2 ranks."""
    model = blocks(10, 30, 20, root=100)

    def plan(scheme, backend="cuda"):
        return memory_plan(model, 2, scheme=scheme, mp_policy=BF16, backend=backend)

    assert plan("odc", "cpu").gathered_bytes == 0
    assert plan("odc").gathered_bytes == plan("fsdp2").gathered_bytes == 2 * (100 + 30 + 30)
    assert plan("fsdp2_no_reshard").gathered_bytes == 2 * 160
    assert plan("odc").transient_gradient_bytes == 2 * 100
    # The root comes before the blocks, so none of it is made while a block is; then all is freed but the root's.
    assert plan("fsdp2").transient_gradient_bytes == max((2 + 4) * 30, (2 + 4) * 100 - 2 * 160)
    # All gradients in fp32, then the root's last microbatch's, less the shards (80 elements) to come.
    assert plan("fsdp2_no_reshard").transient_gradient_bytes == 4 * 160 + 2 * 100 - 4 * 80


def test_fsdp2_shards_are_those_of_fsdp2():
    """Rank 0 of three whose collectives do nothing: FSDP2's own shards, gradients and AdamW states, in bytes."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2))
    model[1].bias.requires_grad_(False)
    plan = memory_plan(model, 3, scheme="fsdp2", mp_policy=BF16)
    fully_shard(model, mesh=init_device_mesh("cpu", (3,)), mp_policy=BF16)
    model(torch.ones(2, 5)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer.step()
    local = [p.to_local() for p in model.parameters()]
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    states = [t for state in optimizer.state.values() for t in state.values()]
    states = [t.to_local() if isinstance(t, DTensor) else t for t in states]
    assert plan.master_shard_bytes == sum(t.nbytes for t in local)
    assert plan.gradient_shard_bytes == sum(t.nbytes for t in gradients)
    assert plan.optimizer_state_bytes == sum(t.nbytes for t in states)
    assert plan.job_shared_bytes == plan.shared_bytes == 0


def saved_bytes(model: nn.Module, tokens: int) -> int:
    """Bytes of the distinct storages that autograd keeps for one forward with loss, parameters apart."""
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in ours:
            saved.setdefault(pointer, tensor)
        return tensor

    ids = torch.arange(tokens)[None] % 7
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(("family", "dtype"), [("Qwen3", torch.bfloat16), ("Llama", torch.float32)])
def test_activations_are_those_that_autograd_saves(family, dtype):
    """Per token: slope of the saved bytes over two lengths. The logits that the caller holds are not saved."""
    model = causal_lm(family, **WIDE, num_hidden_layers=3, head_dim=32, vocab_size=256).to(dtype)
    measured = (saved_bytes(model, 96) - saved_bytes(model, 32)) / 64
    estimate = memory_plan(model, 1).activation_bytes_per_token - 256 * dtype.itemsize
    # What is left out: ids, labels and rotary tables of a token, a few hundred bytes at any width.
    assert measured == pytest.approx(estimate, rel=0.02)


HYBRIDS = {
    "Qwen3_5": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 16},
    "NemotronH": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "chunk_size": 32}
    | {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
}


def hybrid(family: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50, "pad_token_id": 0, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, **HYBRIDS[family]}
    config = getattr(transformers, f"{family}{'Text' * (family == 'Qwen3_5')}Config")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).train()


@RECURRENT
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("family", "checkpointing"), [("Qwen3_5", False), slow("NemotronH", False), slow("Qwen3_5", True)]
)
def test_hybrids_hold_what_is_planned_at_several_lengths(family: str, checkpointing: bool) -> None:
    model = hybrid(family)
    plan = memory_plan(model, 1, gradient_checkpointing=checkpointing)
    enable_packing(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    for tokens in (512, 1024):
        ids = torch.arange(tokens)[None] % 7
        ends = torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
        with LiveBytes() as live:
            given = {"position_ids": ids, "cu_seq_lens_q": ends, "max_length_q": tokens // 2}
            model(input_ids=ids, labels=ids, use_cache=False, **given).loss.backward()
        assert live.most == pytest.approx(tokens * plan.activation_bytes_per_token, rel=0.03)


@RECURRENT
@pytest.mark.parametrize(("family", "attending", "pair"), [("Qwen3_5", 1, 4 * 8 * (8 + 16)), ("NemotronH", 1, 8 * 129)])
def test_of_hybrids_rows_are_read_where_there_is_attention_and_states_elsewhere(family, attending, pair):
    """fp32. Channels of the convolutions: 2 * 2 * 8 + 4 * 16 and 8 * 16 + 2 * 2 * 8, of kernels of 4."""
    channels = {"Qwen3_5": 96, "NemotronH": 160}[family]
    none, tokens, states = (
        memory_plan(hybrid(family), 2, split_tokens=n, split_cuts=k).split_bytes for n, k in ((1, 0), (65, 0), (1, 32))
    )
    assert tokens - none == attending * 64 * 2 * (2 * 16) * (4 + 4)  # keys and values of 2 heads, and gradients
    assert states - none == 32 * (4 + 4) * (3 * channels + pair)


@RECURRENT
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_hybrid_mixtures_are_unknown(checkpointing: bool) -> None:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    with torch.device("meta"):
        model = NemotronHForCausalLM(NemotronHConfig(layers_block_type=["linear_attention", "moe"]))
    plan = memory_plan(model, 2, split_tokens=64, gradient_checkpointing=checkpointing)
    assert plan.activation_bytes_per_token is None


def _heap_bytes(rank: int, world: int, family: str) -> int:
    model = hybrid(family)
    enable_packing(model)
    fully_shard(model)
    enable_split(model, tokens=64, cuts=4)
    heap = engine_of(model).participant(SequenceExchange).buffers.heap
    return heap.size_bytes - heap._data_offset


def test_of_plans_that_differ_in_other_options_one_traces_the_hybrid(monkeypatch):
    traced = []
    monkeypatch.setattr("odc_triton.tools.memory.traced._peak", lambda *_: traced.append(1) or 1000)
    model = hybrid("Qwen3_5")
    _traced.cache_clear()
    try:
        for optimizer in ("adamw", "sgd"):
            memory_plan(model, 2, tokens_per_microbatch=64, optimizer=optimizer)
    finally:
        _traced.cache_clear()
    assert len(traced) == 1


@RECURRENT
@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_split_bytes_are_those_that_are_allocated(family: str) -> None:
    plan = memory_plan(hybrid(family), 2, split_tokens=64, split_cuts=4)
    assert ranks.run(_heap_bytes, 2, family)[0] == pytest.approx(2 * plan.split_bytes, rel=0.01)


def test_checkpointing_keeps_inputs_and_one_layer():
    per_token = {
        (layers, on): memory_plan(qwen2(layers), 1, gradient_checkpointing=on).activation_bytes_per_token
        for layers in (1, 4)
        for on in (False, True)
    }
    layer = (per_token[4, False] - per_token[1, False]) // 3
    assert per_token[4, True] == per_token[1, False] + 4 * 64 * 4
    assert per_token[4, False] - per_token[4, True] == 3 * layer - 4 * 64 * 4


def test_totals_add_up():
    for scheme in SCHEMES:
        plan = memory_plan(qwen2(), 2, scheme=scheme, mp_policy=BF16, backend="cuda", tokens_per_microbatch=10)
        parts = [each.name for each in fields(plan) if each.name.endswith("_bytes") and each.name[:4] != "job_"]
        assert len(parts) == 14
        assert plan.total_bytes == sum(getattr(plan, name) for name in parts) + plan.activation_bytes


def test_buffers_and_checkpoints_in_the_background_take_memory():
    """Of masters, though there is one copy of them in fp32, states and buffers; on a GPU it is the host's."""
    model = qwen2()
    model.register_buffer("table", torch.zeros(10, dtype=torch.float64))
    for backend, in_total in (("cpu", 1), ("cuda", 0)):
        plain, plan = (memory_plan(model, 2, backend=backend, checkpoint_background=each) for each in (False, True))
        assert plan.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())  # whole on every rank
        masters = sum(p.chunk(2)[0].nbytes for p in model.parameters())
        assert plan.checkpoint_host_bytes == masters + plan.optimizer_state_bytes + plan.buffer_bytes
        assert plan.total_bytes == plain.total_bytes + in_total * plan.checkpoint_host_bytes


def test_side_by_side_is_aligned_and_its_unit_fits_the_largest():
    text = side_by_side(*(memory_plan(blocks(3, 4, root=5), 2, scheme=scheme, backend="cpu") for scheme in SCHEMES))
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[-3:] == ["odc/cpu/2", "fsdp2/cpu/2", "fsdp2_no_reshard/cpu/2"]
    big, small = (
        memory_plan(bag(((size,), torch.float32, True), device="meta"), 1, optimizer="none")
        for size in (500_000_000, 500_000)
    )
    for plans, unit, total in (((big,), "GB", "6.000"), ((small,), "MB", "6.000"), ((small, big), "GB", "0.006")):
        lines = side_by_side(*plans).splitlines()
        assert lines[0].startswith(f"{unit} per rank")
        assert [line.split()[1] for line in lines if line.startswith("total")] == [total]


@pytest.mark.parametrize(("gpus", "backend"), [(True, "cuda"), (False, "cpu")])
def test_the_backend_is_by_default_that_of_fully_shard(gpus, backend, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert memory_plan(blocks(3, 4, root=5), 2).backend == backend


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_read_on_demand_is_never_whole(tied):
    vocabulary = 1024 * 64 * 4  # bytes of an embedding or a head: more than a block
    with torch.device("meta"):
        model = qwen2(vocab_size=1024, tie_word_embeddings=tied)
    plain = memory_plan(model, 2, backend="cuda")
    replace_layers(model, roles=["embedding"], verbose=False)
    some = memory_plan(model, 2, backend="cuda")
    assert plain.gathered_bytes - some.gathered_bytes == (0 if tied else vocabulary)  # a tied head is gathered
    replace_layers(model, roles=["head"], verbose=False)
    both = memory_plan(model, 2, backend="cuda")
    assert plain.gathered_bytes - both.gathered_bytes == vocabulary * (1 if tied else 2)
    assert both.transient_gradient_bytes < plain.transient_gradient_bytes
    assert both.compute_shard_bytes == plain.compute_shard_bytes


def mixture(choice: str = "experts=staged") -> nn.Module:
    model = causal_lm("Mixtral").bfloat16()
    replace_layers(model, roles=["experts"], choice=choice, verbose=False)
    return model


ROWS = 96 * 32 + 32 * 48  # elements of an expert, of which each of two layers has five


@pytest.mark.parametrize(
    ("choice", "slots"),
    [("auto", 0), ("experts=triton/direct", 0), ("experts=staged", 8 * ROWS), ("experts=triton/staged", 8 * 2**23)],
)
def test_other_ranks_experts_are_at_most_all_of_them(choice: str, slots: int) -> None:
    """Of 2 ranks the other has 2 of 5 experts; bf16, with sums in fp32. A kernel's slot is 8 MiB, in whole rows."""
    model, plain, whole = mixture(choice), causal_lm("Mixtral").bfloat16(), choice == "auto"
    none, some, lots = (memory_plan(model, 2, backend="cuda", expert_cache_bytes=n) for n in (0, 16 * ROWS, 2**30))
    assert none.other_experts_bytes == pytest.approx(slots, rel=1e-3)
    kept = [each.total_bytes - none.total_bytes for each in (some, lots)]
    assert kept == ([0, 0] if whole else [4 * ROWS * 2 + 2 * ROWS * 4, 4 * ROWS * (2 + 4)])
    assert memory_plan(model, 2, backend="cpu", expert_cache_bytes=2**30).other_experts_bytes == 0  # a view
    gathered = memory_plan(plain, 2, backend="cuda").gathered_bytes - none.gathered_bytes
    assert gathered == (0 if whole else 2 * 2 * 5 * ROWS)  # two blocks
    fused = memory_plan(mixture(f"{choice}/fused"), 2, backend="cuda").transient_gradient_bytes
    of_root = 2 * (2 * 97 + 1) * 32  # of the root's unit; else torch makes a block's
    assert fused == (of_root if "triton" in choice else none.transient_gradient_bytes)
    assert none.transient_gradient_bytes > 2 * 5 * ROWS


BUDGETS = [0, 70_000, 2**30]


def _held(rank: int, world: int) -> list[int]:
    """Bytes of kept rows, sums and slots after a minibatch; a CPU has slots of one thread, so they count twice."""
    found, ids = [], torch.arange(40)[None]
    for budget in BUDGETS:
        model = fully_shard(mixture(), backend="cpu-sharded", expert_cache_bytes=budget)
        with minibatch(model, tokens=40):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        rows = [each.rows for each in engine_of(model).parameters if each.rows is not None]
        slots = [slot.nbytes for pair in rows[0].slots._places.values() for slot in pair]
        found.append(2 * sum(slots) + sum(each._copies.nbytes + each._sums.nbytes for each in rows))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 7])
def test_other_ranks_experts_are_as_planned(world: int) -> None:
    plans = [memory_plan(mixture(), world, backend="cuda", expert_cache_bytes=budget) for budget in BUDGETS]
    assert ranks.run(_held, world)[0] == [plan.other_experts_bytes for plan in plans]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_ranks": 3}, "run_ranks is 3: give 1 to world=2, and plan one host, without replicas"),
        ({"expert_cache_bytes": 9, "scheme": "fsdp2"}, "expert_cache_bytes is 9 for 'fsdp2': it is for 'odc' only"),
        ({"quantize": "nf4"}, "quantize is 'nf4', and Module has no frozen linear layer: add LoRA"),
        ({"world": 0}, "world is 0; give a whole number of at least 1"),
        ({"scheme": "ddp"}, "scheme is 'ddp'; use one of 'odc', 'fsdp2', 'fsdp2_no_reshard'"),
        ({"scheme": "fsdp2", "checkpoint_background": True}, "checkpoint_background is True for 'fsdp2': it is for"),
        ({"tokens_per_microbatch": -1}, "tokens_per_microbatch is -1; give a whole number of at least 0"),
        ({"model": nn.ReLU()}, "ReLU has no parameters; plan the model"),
        ({"world": "8"}, "world is '8'; give a whole number of at least 1"),
        ({"model": "Qwen/Qwen2.5-7B"}, "memory_plan takes an nn.Module, not a str"),
        ({"mp_policy": torch.bfloat16}, "mp_policy is a dtype; give a MixedPrecisionPolicy"),
    ],
)
def test_refusals_name_the_value_and_the_remedy(options, message):
    arguments = {"model": bag(((2,), torch.float32, True)), "world": 2, **options}
    with pytest.raises((ValueError, TypeError), match=message):
        memory_plan(**arguments)
