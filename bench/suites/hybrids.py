"""A hybrid model, a Qwen3.5 of three recurrent layers to one that attends, on real CPU ranks.

    python -m bench.suites.hybrids bench/results/hybrids.json [--quick] [--only PART ...]

`costs`: the time of a FLOP of attention, and of the rule, in those of linear layers, as `odc-triton tune` measures it;
all plans and bounds below are by these.
`split`: LongAlign-like samples, one a rank, on two ranks, over the fastest way without splitting. `bound`: its fuller
rank's cost over the even share; `bound_with_pairs` counts what the plan's pairs cost. Two ranks need no pair.
`three_ranks`: the same, of the fullest rank's CPU seconds, which leave waiting out: three ranks on two cores would
time each other. And what computing in bf16 changes, split and not, by `bf16`: relative, over fp32.
`group`: GRPO's update, a prompt with 8 completions, over the fastest way that repeats the prompt.
`memory`: the most bytes of tensors in a minibatch, and the shared memory of a rank, over what `memory_plan` says.
`pair`: forward and backward of a segment whose state is not known yet, by one call of the rule and by two, over the
rule alone; and the bytes that autograd keeps. `step_share`: of the one call, what a pair adds to a segment's step.

Each way of a comparison computes the same gradient, or it raises; then all are timed in turn.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from odc_triton import enable_split, fully_shard, minibatch, replace_layers
from odc_triton.balance import CostModel, PackedDataset, pack_collate
from odc_triton.engine.api import engine_of
from odc_triton.hf import enable_packing, summed_loss
from odc_triton.jobs.launcher.launch import launch
from odc_triton.packs.collate import count_target_tokens
from odc_triton.plan.decoder import Decoder
from odc_triton.plan.line import Strip, zigzag
from odc_triton.plan.planner import SPLIT
from odc_triton.plan.segments import SplitPlan
from odc_triton.recurrent.layers import recurrent_layers
from odc_triton.recurrent.packages import Function
from odc_triton.recurrent.rules import DeltaRule, add_reads
from odc_triton.sequence.exchange import SequenceExchange
from odc_triton.tools.memory.footprint import memory_plan
from odc_triton.tools.memory.traced import LiveBytes
from odc_triton.tools.tune.attention import RULES, measure_attention, measure_rule
from odc_triton.tools.tune.workload import workloads_of

from .. import harness, quiet
from ..cut import scaled_minibatches
from ..demo import LENGTHS, RANKS, WARM_UP
from ..provenance import options_of, save_measured, save_parts
from ..reports.versus import random_text
from ..variants import Ddp, Fsdp2NoReshard, Odc, OdcShared, OdcSplit, OdcTrees, Setting
from ..whole import whole
from .prefixes import Trees, fastest, flops, run

WHOLE = (Odc, Fsdp2NoReshard, Ddp)
MOST_APART = 2e-5  # of gradients, in fp32
_CONFIG = {"vocab_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
_CONFIG |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "linear_num_key_heads": 2}
_CONFIG |= {"linear_num_value_heads": 4, "max_position_embeddings": 8192, "tie_word_embeddings": False}
_GROUP = Trees(prompt=1024, completion=256, trees=1, rounds=5)


@dataclass(frozen=True, kw_only=True)
class Size:
    """`lengths`: whose memory is measured; `segment`: tokens of the one that makes a pair."""

    hidden: int = 256
    longest: int = 4096
    rounds: int = 14
    group: Trees = _GROUP
    lengths: tuple[int, ...] = (512, 1024, 2048)
    segment: int = 1024

    @property
    def config(self) -> dict[str, Any]:
        width = self.hidden // 4
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.hidden * 11 // 4, "head_dim": width}
        return _CONFIG | sizes | {"linear_key_head_dim": width, "linear_value_head_dim": width}


_FEW = Trees(prompt=64, completion=16, trees=1, rounds=1)
QUICK = Size(hidden=64, longest=1024, rounds=2, group=_FEW, lengths=(128, 256), segment=128)


@dataclass(frozen=True, kw_only=True)
class HybridWork(harness.Work):
    """`factors`: the measured ones of attention and of the rule."""

    factors: tuple[float, float]

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**self.config))
        for layer in recurrent_layers(model):
            # As trained models, it remembers: by transformers' random weights a state is forgotten in a token or two,
            # and no gradient would tell whether it was handed on.
            nn.init.trunc_normal_(layer.A_log, -3.0)
        return model

    def cost(self) -> CostModel:
        attention, rule = self.factors
        return CostModel.from_config(Qwen3_5TextConfig(**self.config), attention=attention, rule=rule)


def long_samples(size: Size, folder: Path, factors: tuple[float, float], ranks: int) -> HybridWork:
    """One sample a rank; the last minibatch, by which gradients are compared, is the most uneven."""
    how = {"longest": size.longest, "samples": ranks, "minibatches": WARM_UP + size.rounds, "seed": ranks}
    lengths, drawn = scaled_minibatches(LENGTHS, **how)
    drawn.sort(key=lambda samples: max(lengths[each] for each in samples) / sum(lengths[each] for each in samples))
    of = {"config": size.config, "minibatches": drawn, "token_cap": size.longest}
    return HybridWork(**vars(random_text(lengths, folder / f"{ranks}.npz", ranks, **of)), factors=factors)


def measured_costs(size: Size) -> tuple[float, float]:
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**size.config))
    replace_layers(model, verbose=False)  # `workloads_of` counts these
    decoder, layers, module = Decoder.of(model.config), workloads_of(model), recurrent_layers(model)[0]
    how = {"counts": size.lengths, "rounds": 3, "dtype": torch.float32, "device": torch.device("cpu")}
    return measure_attention(decoder, layers, **how), measure_rule(decoder.recurrent, module, layers, **how)


def over_bounds(work: HybridWork, ranks: int, unsplit: Sequence[float], split: Sequence[float]) -> dict[str, Any]:
    """Of the times of one sample a rank."""
    cost, data, largest, even, pairs = work.cost(), work.data(), 0.0, 0.0, 0.0
    for samples in work.minibatches[WARM_UP:]:
        costs = [cost.sequence(int(data.lengths[index])) for index in samples]
        largest, even = largest + max(costs), even + sum(costs) / ranks
        plan = harness.assign_packs(work, data, samples, SPLIT, cost, ranks=ranks)[0].split
        for each in [] if plan is None else [planned.segment for planned in plan.segments]:
            if each.start and each.stop < data.lengths[each.sample]:
                pairs += cost.pair * len(each) / ranks
    bounds = {"bound": largest / even, "bound_with_pairs": largest / (even + pairs), "pairs_share": pairs / even}
    found = bounds | harness.bootstrap_ratio(unsplit, split)
    return found | {f"share_of_{key}": found["ratio"] / found[key] for key in ("bound", "bound_with_pairs")}


def close_enough(apart: float) -> float:
    if not apart <= MOST_APART:
        raise ValueError(f"gradients are {apart} apart: at most {MOST_APART}")
    return apart


def split(work: HybridWork) -> dict[str, Any]:
    results = run([(kind, work.token_cap) for kind in (*WHOLE, OdcSplit)], work, MOST_APART)
    seconds = {each.name: each.seconds[WARM_UP:] for each in results}
    best = min((kind.name for kind in WHOLE), key=lambda name: statistics.median(seconds[name]))
    found = over_bounds(work, RANKS, seconds[best], seconds[OdcSplit.name]) | {"over": best, "seconds": seconds}
    found |= {"gradients_apart": max(each.apart for each in results)}
    return found | {"disturbed": harness.disturbed(results, WARM_UP)}


def three_ranks(work: HybridWork) -> dict[str, Any]:
    """Collective."""
    rank, world = harness.open_job()
    data, cost, ways = work.data(), work.cost(), [harness.build(kind, work) for kind in (Odc, OdcSplit)]
    apart = close_enough(max(harness.gradients_apart(ways, [work] * 2, data, cost)))
    took: list[list[float]] = [[], []]
    for index, samples in enumerate(work.minibatches):
        for number in harness.in_turn((0, 1), index):
            assigned = harness.assign_packs(work, data, samples, ways[number].balance, cost)
            start_s = time.thread_time()
            harness.timed(ways[number], assigned[rank], sum(map(count_target_tokens, assigned)), index)
            took[number].append(max(harness.gather(time.thread_time() - start_s)))
    took = [each[WARM_UP:] for each in took]
    found = over_bounds(work, world, *took) | {"cpu_seconds": took, "gradients_apart": apart}
    return found | {"bf16": in_bf16(work)}


def in_bf16(work: HybridWork) -> dict[str, dict[str, float]]:
    """Mean over three minibatches. `gradients`: the norm of the difference; `worst`: of a parameter. Collective."""
    data, cost, found = work.data(), work.cost(), []
    for kind, dtype in ((Odc, "fp32"), (Odc, "bf16"), (OdcSplit, "bf16")):
        variant = harness.build(kind, work, Setting(dtype=dtype))
        for samples in work.minibatches[-3:]:
            assigned = harness.assign_packs(work, data, samples, kind.balance, cost)
            targets = sum(map(count_target_tokens, assigned))
            loss = sum(harness.gather(variant.gradients(assigned[harness.open_job()[0]], targets))) / targets
            found.append((loss, [whole(each.grad).float() for each in variant.model.parameters()]))
            variant.optimizer.zero_grad()
    rows = {}
    for name, first in (("unsplit", 3), ("split", 6)):
        errors = [_errors(*both) for both in zip(found[:3], found[first : first + 3], strict=True)]
        means = map(statistics.mean, zip(*errors, strict=True))
        rows[name] = dict(zip(("loss", "gradients", "worst"), means, strict=True))
    return rows


def _errors(wanted: tuple[float, list[Tensor]], found: tuple[float, list[Tensor]]) -> tuple[float, ...]:
    norms = torch.tensor([[(b - a).norm(), a.norm()] for a, b in zip(wanted[1], found[1], strict=True)])
    off, of = norms.norm(dim=0).tolist()
    return abs(found[0] / wanted[0] - 1), off / of, float((norms[:, 0] / norms[:, 1]).max())


def group(size: Size, folder: Path, factors: tuple[float, float]) -> dict[str, Any]:
    work = HybridWork(**vars(size.group.work(folder)) | {"config": size.config}, factors=factors)
    longest = size.group.prompt + size.group.completion
    best, ours = fastest([(kind, longest * packed) for packed in (1, 2) for kind in WHOLE], work)[0], OdcShared
    arms = [best, *((kind, size.group.tokens()) for kind in (OdcTrees, ours))]
    results = run(arms, work, MOST_APART)
    seconds = [each.seconds[WARM_UP:] for each in results]
    found = harness.median_ratio(seconds[0], seconds[-1]) | {"bound": flops(best, work) / flops(arms[-1], work)}
    found |= {"arms": [f"{kind.name}, packs of {cap} tokens" for kind, cap in arms], "seconds": seconds}
    found |= {"over_tree_per_rank": harness.median_ratio(seconds[1], seconds[-1])["ratio"]}
    found |= {"gradients_apart": max(each.apart for each in results), "disturbed": harness.disturbed(results, WARM_UP)}
    return found | {"share_of_bound": found["ratio"] / found["bound"]}


def memory(size: Size) -> list[dict[str, Any]]:
    """Of the fuller rank, each with `tokens` of its own sample, or of one that both share. Collective."""
    (rank, world), rows, config = harness.open_job(), [], Qwen3_5TextConfig(**size.config)
    for tokens, is_split in product(size.lengths, (False, True)):
        # The segments that a rank has between another's make a pair, which is what is planned.
        cut = zigzag(Strip(0, 0, tokens * world), world, 1)
        assigned = [[cut[at]] if is_split else [[0]] for at in range(world)]
        ids = torch.randint(3, 4096, (tokens * (world if is_split else 1),), generator=torch.Generator().manual_seed(0))
        (pack,) = pack_collate(PackedDataset([{"input_ids": ids, "labels": ids.clone()}]).__getitems__(assigned[rank]))
        model, how = Qwen3_5ForCausalLM(config).train(), {"split_tokens": tokens, "split_cuts": 2} if is_split else {}
        plan = memory_plan(model, world, tokens_per_microbatch=tokens, backend="cpu", optimizer="none", **how)
        enable_packing(model)
        fully_shard(model, backend="cpu")
        heaps = [engine_of(model).heap]
        if is_split:
            enable_split(model, tokens=tokens, cuts=2)
            heaps.append(engine_of(model).participant(SequenceExchange).buffers.heap)
        with minibatch(model, tokens=1, split=SplitPlan.of(assigned) if is_split else None), LiveBytes() as live:
            summed_loss(model, pack).backward()
        live_bytes, shared = max(harness.gather(live.most)), sum(heap.size_bytes for heap in heaps) // world
        rows.append({"split": is_split, "tokens": tokens, "peak_bytes": live_bytes + shared})
        rows[-1] |= {"live_bytes": live_bytes, "plan_bytes": plan.total_bytes}
        rows[-1] |= {"live_over_plan": live_bytes / plan.activation_bytes}
        rows[-1] |= {"peak_over_plan": rows[-1]["peak_bytes"] / plan.total_bytes}
    return rows


class _Kept(dict):
    """Bytes that autograd keeps, by storage."""

    def __call__(self, tensor: Tensor) -> Tensor:
        self[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor


def pair(size: Size) -> dict[str, Any]:
    config, tokens, random = Qwen3_5TextConfig(**size.config), size.segment, partial(torch.randn, requires_grad=True)
    heads, width = config.linear_num_value_heads, config.linear_key_head_dim
    rows, gates = [random(1, tokens, heads, width) for _ in range(3)], [random(1, tokens, heads) for _ in range(2)]
    model, ids, state = Qwen3_5ForCausalLM(config), torch.randint(3, 4096, (1, tokens)), random(1, heads, width, width)
    function = Function(getattr(sys.modules[Qwen3_5ForCausalLM.__module__], RULES["delta"]), None)

    def segment(way: str) -> Sequence[Tensor]:
        """What comes out, and the state after it."""
        inputs = [*rows, -gates[0].exp(), gates[1].sigmoid()]
        rule = DeltaRule(function, inputs, {"use_qk_l2norm_in_kernel": True})
        if way == "rule":
            return rule.run(0, tokens, state)
        *out, step = rule.affine(0, tokens, None)
        after = rule.after(state, step)
        return (add_reads(*out, state) if way == "one_call" else rule.run(0, tokens, state)[0]), after

    def seconds(way: str) -> float:
        start_s = time.perf_counter()
        outputs = segment(way) if way != "step" else [model(input_ids=ids, labels=ids, use_cache=False).loss]
        sum(each.sum() for each in outputs).backward()
        return time.perf_counter() - start_s

    ways, kept, gradients = ("rule", "one_call", "two_calls"), {}, {}
    for way in ways:
        with torch.autograd.graph.saved_tensors_hooks(saved := _Kept(), lambda tensor: tensor):
            outputs = segment(way)
        kept[way] = sum(saved.values())
        gradients[way] = torch.autograd.grad(sum(each.square().sum() for each in outputs), [*rows, *gates, state])
    pairs = [both for way in ways[1:] for both in zip(gradients["rule"], gradients[way], strict=True)]
    apart = close_enough(max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs))
    took: dict[str, list[float]] = {way: [] for way in ("step", *ways)}
    for number in range(size.rounds + 1):
        for way in harness.in_turn([*took], number):
            took[way].append(seconds(way))
    median = {way: statistics.median(each[1:]) for way, each in took.items()}
    more = config.layer_types.count("linear_attention") * (median["one_call"] - median["rule"])
    over = {way: {"time": median[way] / median["rule"], "kept": kept[way] / kept["rule"]} for way in ways}
    found = {"tokens": tokens, "seconds": took, "kept_bytes": kept, "over_rule": over, "gradients_apart": apart}
    return found | {"step_share": more / (median["step"] + more)}


def main() -> None:
    options = options_of(__doc__, out="out", only=("split", "three_ranks", "group", "memory", "pair"), quick=False)
    size = QUICK if options.quick else Size()
    harness.single_thread_environment()
    torch.set_num_threads(1)
    factors = measured_costs(size)
    save_parts(options.out, costs=dict(zip(("attention", "rule"), factors, strict=True)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measure: dict[str, Callable[[], Any]] = {
            "split": lambda: split(long_samples(size, folder, factors, RANKS)),
            "three_ranks": lambda: launch(three_ranks, long_samples(size, folder, factors, 3), ranks=3)[0],
            "group": lambda: group(size, folder, factors),
            "memory": lambda: launch(memory, size, ranks=RANKS)[0],
            "pair": lambda: pair(size),
        }
        for part in options.only:
            start_s, found = time.monotonic(), measure[part]()
            save_measured(options.out, start_s, **{part: found})
            print(part, found, flush=True)
            if "disturbed" in found:
                print(quiet.in_words(found["disturbed"], size.rounds))


if __name__ == "__main__":
    main()
