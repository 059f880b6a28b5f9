"""Models in the simulator: sizes and FLOPs against those of transformers, memory against `memory_plan`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from odc_triton.balance import CostModel
from odc_triton.plan.entries import Segment
from odc_triton.tools.simulate.hardware import DEVICES
from odc_triton.tools.simulate.job import Job, sizes_of
from odc_triton.tools.simulate.models import MODELS, Model
from odc_triton.tools.simulate.run import simulate
from odc_triton.tools.simulate.study import make_job, rank_settings, usual_links
from tests.simulate.toys import toy
from tests.support import slow
from tests.support.families import causal_lm
from tests.support.models import MIXTURES, build
from tests.support.versions import RECURRENT
from tests.support.vision import FAMILIES

COST = CostModel(quadratic=1e-8, linear=1e-4)
# Billions of parameters, all and active, as their authors say; gpt-oss's active ones leave the embedding out.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "qwen3-30b-a3b": (30.5, 3.3),
    "gpt-oss-20b": (20.9, 3.6 + 0.58),
    "gpt-oss-120b": (116.8, 5.1 + 0.58),
    "deepseek-v3": (671, 37),
}
_FAST = ("qwen2.5-0.5b", "mixtral-8x7b", "deepseek-v3")
NAMES = [*_FAST, *(slow(name) for name in MODELS if name not in _FAST)]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_the_models(name: str, tmp_path: Path) -> None:
    """Block by block; on more GPUs than experts too, and on numbers that don't divide them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**MODELS[name])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    model, read = Model.find(name), Model.find(str(tmp_path))
    told = ("cost", "parameters", "active_parameters", "layers", "kv_width", "logits_bytes")
    assert [getattr(read, each) for each in told] == [getattr(model, each) for each in told]
    layers = [list(layer.parameters()) for layer in built.model.layers]
    everything = list(built.parameters())
    in_blocks = {id(p) for layer in layers for p in layer}
    root = [p for p in everything if id(p) not in in_blocks]
    assert (model.layers, model.parameters) == (len(layers), sum(p.numel() for p in everything))
    for shards in (1, 5, 8, 16, 64):
        sent = [shards * sum(p.chunk(shards)[0].numel() for p in unit) for unit in (root, *layers)]
        assert model.sent(shards) == sent
    assert model.cost.quadratic == CostModel.from_config(config).quadratic
    # That leaves norms and biases out.
    assert model.cost.linear == pytest.approx(CostModel.from_config(config).linear, rel=2e-3)
    if name in PUBLISHED:
        unused = sum(
            sum(p[0].numel() for p in experts.parameters()) * (experts.num_experts - config.num_experts_per_tok)
            for experts in (getattr(layer.mlp, "experts", None) for layer in built.model.layers)
            if experts is not None
        )
        assert model.active_parameters == sum(p.numel() for p in everything) - unused
        billions = [model.parameters / 1e9, model.active_parameters / 1e9]
        assert billions == pytest.approx(PUBLISHED[name], rel=0.02)


def test_a_tokens_experts_by_another_name() -> None:
    """Gemma 4's `top_k_experts`."""
    experts = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 24}
    built = causal_lm("Gemma4", **experts)
    each = sum(p[0].numel() for name, p in built.named_parameters() if ".experts." in name)
    model = Model.of(built, name="gemma4")
    assert model.parameters - model.active_parameters == 3 * each


def test_memory_is_that_of_memory_plan() -> None:
    """Masters and states of ODC spread over all nodes, FSDP2's stay with the shards; logits only without a fused head;
    the step reads and writes 30 bytes for each of a rank's masters, and its shards cross the nodes.
    """
    from odc_triton import MixedPrecisionPolicy, memory_plan

    model, kind = Model.find("qwen2.5-0.5b"), DEVICES["a100"]
    links = usual_links(kind, 4, nodes=2)
    shards, replicas = 4, 2
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for checkpointing in (False, True):
        fused, plain = (
            make_job(model, kind, links, checkpointing=checkpointing, fused_head=head) for head in (True, False)
        )
        for schedule, scheme in (("odc", "odc"), ("fsdp", "fsdp2"), ("fsdp-no-reshard", "fsdp2_no_reshard")):
            how = {"backend": "cuda", "gradient_checkpointing": checkpointing, "tokens_per_microbatch": 100}
            copies = replicas if schedule == "odc" else 1
            plan = memory_plan(model.module, shards, replicas=copies, scheme=scheme, mp_policy=policy, **how)
            assert plain.peak_bytes(schedule, 100) == plan.total_bytes
            assert plan.total_bytes - fused.peak_bytes(schedule, 100) == 100 * (2 + 4) * 151936
            moved = 30 * model.parameters / shards / copies / (kind.memory_gbs * 1e9)
            if schedule == "odc":
                moved += sum(links.replicas_s(each * model.parameters / shards) for each in (2, 4))
            assert plain.tail_s(schedule) == pytest.approx(moved, rel=1e-4)
            how = {"job": plain, "schedule": schedule, "balance": "mini", "token_cap": 100}
            assert simulate([[60, 100, *[10] * 6]], **how).peak_bytes == plan.total_bytes  # the largest microbatch's


@pytest.mark.slow
def test_of_a_frozen_base_adapters_alone_are_added_and_stepped() -> None:
    """Recomputed, a weight takes three products in place of four, and attention as much."""
    full, kind, base = Model.find(_FAST[0]), DEVICES["a100"], Model.find(_FAST[0]).with_adapters(4)
    jobs = [make_job(each, kind, usual_links(kind, 4)) for each in (full, base)]
    for tokens, share in ((1, 3 / 4), (10**9, 1)):
        assert jobs[1].seconds([tokens]) == pytest.approx(jobs[0].seconds([tokens]) * share, rel=1e-3)
    adapters = base.parameters - full.parameters
    assert sum(base.sent(4, trained=True)) == pytest.approx(adapters, rel=0.01)
    assert jobs[1].tail_s("odc") == pytest.approx(30 * adapters / 4 / (kind.memory_gbs * 1e9), rel=0.01)


@pytest.mark.parametrize("name", ["qwen2", *MIXTURES])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """A forward of the real model, expert by expert, of which torch counts every product."""
    model, tokens = build(name).eval(), 24
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(tokens)[None], use_cache=False)
    by_module = counter.get_flop_counts()
    # Older versions of transformers multiply positions by frequencies as matrices.
    of_positions = sum(sum(ops.values()) for module, ops in by_module.items() if module.endswith("rotary_emb"))
    cost = CostModel.from_config(model.config)
    # Eager attention computes the masked half too. Backward is twice the forward.
    assert counter.get_total_flops() - of_positions == (cost.linear * tokens + 2 * cost.quadratic * tokens**2) / 3


def test_only_layers_with_attention_cost_it() -> None:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
    with torch.device("meta"):
        half, whole = (
            Model.of(Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=[*kinds, *kinds])), name="lfm2")
            for kinds in (["conv", "full_attention"], ["full_attention"] * 2)
        )
    assert 0 < 2 * half.cost.quadratic == whole.cost.quadratic


@RECURRENT
def test_a_hybrid_is_simulated_by_its_layers(tmp_path: Path) -> None:
    """Of its 3 linear layers to one of attention the pair takes time, but not in the first and the last segment."""
    from transformers import Qwen3_5TextConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "head_dim": 16}
    config = Qwen3_5TextConfig(**sizes, **heads, linear_value_head_dim=16, vocab_size=64, intermediate_size=96)
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.save_pretrained(tmp_path)
    model = Model.find(str(tmp_path))
    rule = 3 * 3 * 6 * 4 * 8 * 16  # of 3 layers: forward and backward
    assert (model.layers, model.kv_width) == (4, 2 * (16 + 16))
    assert model.cost == CostModel.from_config(config)
    assert (model.cost.quadratic, model.cost.pair) == (3 * 4 * (16 + 16), pytest.approx(0.48 * rule))
    job = make_job(model, DEVICES["a100"], usual_links(DEVICES["a100"], 1))
    segments = (Segment(0, 0, 30), Segment(0, 30, 60), Segment(0, 60, 90))
    lasted = [
        job.pack_seconds(sizes_of([segment], [90])) / (job.seconds([1]) - job.seconds([])) for segment in segments
    ]
    plain = [model.cost.segment(segment.start, segment.stop) / model.cost.sequence(1) for segment in segments]
    assert lasted == pytest.approx([plain[0], plain[1] + 30 * model.cost.pair / model.cost.sequence(1), plain[2]])
    assert simulate([[90] * 4], job=job, schedule="odc", balance="mini", token_cap=90).step_s > 0


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_of_a_model_that_sees_images_the_text_decoder_is_simulated(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family].model()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    found = Model.find(str(tmp_path))
    text = sum(p.numel() for p in model.model.language_model.parameters())
    head = 0 if family == "gemma3" else model.lm_head.weight.numel()  # tied there
    assert (found.layers, found.parameters) == (2, text + head)
    assert found.cost.quadratic == CostModel.from_config(model.config.get_text_config()).quadratic
    assert found.memory("odc", shards=2, ranks=2, checkpointing=False).total_bytes > 0


def test_each_block_takes_its_own_time() -> None:
    """Transfers alone, one after the other: a dense block's are shorter, and experts wait for those who have them."""
    model = toy([(240, 5000), (4, 300_000)], root=(24, 1000), cost=COST)
    for ranks, experts in ((4, 4), (8, 8), (3, 6)):  # as long as 8 experts over 8 ranks; 6 over 3
        links = usual_links(DEVICES["a100"], ranks)
        how = {"prefetch": False, "overlap": False}
        job = Job(links=links, seconds=lambda lengths: 1e-12, cost=COST, layers=2, model=model, **how)

        def seconds(n_bytes: int, links=links) -> float:
            return links.read_s(n_bytes)

        want = sum(2 * seconds(2 * n) + seconds(4 * n) for n in (240 * 5000, experts * 300_000))
        want += seconds(2 * 24_000) + seconds(4 * 24_000)
        outcome = simulate([[10] * 2 * ranks], job=job, schedule="odc", balance="mini", token_cap=10)
        assert outcome.microbatches == [[2] * ranks]
        assert outcome.step_s - job.tail_s("odc") == pytest.approx(2 * want, rel=1e-6)


def test_what_the_states_do_not_leave_room_for_does_not_fit() -> None:
    """Even if nobody knows what activations take."""
    model = Model.find("mixtral-8x7b")
    for kind, fits in ((DEVICES["a100"], False), (DEVICES["b200"], True)):
        job = make_job(model, kind, usual_links(kind, 8))
        rows = rank_settings([1000] * 8, [1], job=job, token_cap=1000, memory_gb=kind.memory_gb, trials=1)
        assert {row.fits for row in rows if "no reshard" not in row.name} == {fits}
        assert all(row.outcome.peak_bytes is None for row in rows)
