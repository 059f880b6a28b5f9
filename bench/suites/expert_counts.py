"""Mixtures of experts, counted before any kernel: `python -m bench.suites.expert_counts [--out FILE]`. Needs no GPU.

`routing`: the share of a layer's experts that a pack hits, and how uneven they are, with uniform routing and as small
Qwen3-MoEs route text that they were not trained on. They are trained here, on this repository's pages and code.
`gpus`: bytes and seconds of a minibatch, by the simulator's links and FLOPs; docs/scale.md says what is assumed.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product, repeat
from multiprocessing import get_context
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from odc_triton.tools.simulate.hardware import GpuKind, Links, find_device
from odc_triton.tools.simulate.models import Model
from odc_triton.tools.simulate.study import named_lengths, usual_links

from ..provenance import RESULTS, ROOT, about, options_of, save_parts

PACKS = (16, 32, 64, 128, 256, 512, 1024, 4096)  # tokens
PIECES = {"one": 1, "several": 8}  # documents of a pack
# Experts, top k, and the auxiliary loss's coefficient: transformers' default is 0.001, Megatron's example has 0.01.
ROUTERS = [(*each, weight) for each in ((64, 4), (128, 8), (256, 8)) for weight in (0.001, 0.01)] + [(128, 8, 0.0)]
TOKENS, MINIBATCHES = (2048, 8192, 32768), (1, 4, 16)
READ, ADDED = 2, 4  # bytes of an element: bf16 weights, fp32 sums of gradients
EFFICIENCY = 0.5  # of the peak FLOP/s, as in the simulator
NIC_GBS = 45.0  # DeepEP's 51 GB/s over 64 H800, of which 1/8 stays on the host
SPARE_GB, DRAWS = 20, 8  # for activations and buffers; minibatches
_SOURCES = ("docs/**/*.md", "odc_triton/**/*.py", "kernels/**/*.py", "tests/**/*.py", "bench/**/*.py")
_CONFIG = {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
_CONFIG |= {"num_key_value_heads": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "tie_word_embeddings": True}
Pack, Ranks = Sequence[int], Sequence[Sequence[Sequence[int]]]  # tokens of documents; each rank's packs
Found = tuple[float, float]  # seconds; bytes in each direction of a GPU's port


def documents() -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each file: to train on, and, of each fifth, to count."""
    files = sorted({path for pattern in _SOURCES for path in ROOT.glob(pattern)})
    texts = [text for path in files if (text := path.read_text(encoding="utf-8"))]
    tokenizer, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=_CONFIG["vocab_size"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for at, text in enumerate(texts) if at % 5], trainer)
    tokens = [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts)]
    return [each for at, each in enumerate(tokens) if at % 5], tokens[::5]


def trained(experts: int, chosen: int, auxiliary: float, steps: int) -> tuple[dict[str, Any], list[Tensor]]:
    """How training went, and the experts of each token of each document that was kept out: [layers, tokens, chosen]."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, kept = documents()
    how = {"num_experts": experts, "num_experts_per_tok": chosen, "router_aux_loss_coef": auxiliary}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_CONFIG, **how, output_router_logits=True))
    model.set_experts_implementation("grouped_mm")
    text, losses, routed = torch.cat(train), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)

    def run(ids: Tensor) -> Any:
        found = model(input_ids=ids, labels=ids, use_cache=False)
        losses.append(found.loss.item() - auxiliary * found.aux_loss.item())
        return found

    for _ in range(steps):
        run(text[torch.randint(0, len(text) - 256, (4, 1)) + torch.arange(256)]).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        for ids in kept:
            parts = [run(part[None]).router_logits for part in ids.split(1024)]
            chosen_experts = [torch.stack([each.topk(chosen).indices for each in part]) for part in parts]
            routed.append(torch.cat(chosen_experts, 1).short())
    said = {"steps": steps, "train_tokens": len(text), "kept_tokens": sum(map(len, kept)), "first_loss": losses[0]}
    kept_loss = torch.tensor(losses[steps:]).nanmean().item()  # one token has none
    return said | {"last_loss": statistics.mean(losses[steps - 50 : steps]), "kept_loss": kept_loss}, routed


def draw(routed: Sequence[Tensor], tokens: int, segments: int, numbers: random.Random) -> Tensor:
    """A pack of as many tokens of each of `segments` documents, from anywhere within them."""
    each = tokens // segments
    found = numbers.choices([document for document in routed if document.shape[1] >= each], k=segments)
    starts = [numbers.randint(0, document.shape[1] - each) for document in found]
    return torch.cat([document[:, at : at + each] for document, at in zip(found, starts, strict=True)], 1)


def loads(pack: Tensor, experts: int) -> Tensor:
    """The share of (token, expert) pairs that each expert of each layer has: [layers, experts]."""
    flat = pack.flatten(1).long()
    return torch.zeros(len(flat), experts).scatter_add_(1, flat, torch.ones(flat.shape)) / flat.shape[1]


def fullest(shares: Tensor, owners: int) -> float:
    """The share of the fullest of `owners`, which have equally many experts in order; mean of all but the last axis."""
    return shares.unflatten(-1, (owners, -1)).sum(-1).amax(-1).mean().item()


def count(routed: Sequence[Tensor], experts: int, tokens: int, segments: int, *, draws: int = 128) -> dict[str, Any]:
    """Means over layers and packs; `low` and `high`: 10% and 90% of packs, each the mean of its layers. `ranks_8`: the
    fullest of 8 owners' share over 8 such packs, one a rank, in times of an even one; `ranks_64`: of 64 over 64.
    """
    numbers = random.Random(0)
    shares = torch.stack([loads(draw(routed, tokens, segments, numbers), experts) for _ in range(draws)])
    hits = (shares > 0).float().mean(2)
    low, high = hits.mean(1).quantile(torch.tensor([0.1, 0.9])).tolist()
    found = {"hit": hits.mean().item(), "low": low, "high": high, "hit_by_layer": hits.mean(0).tolist()}
    found |= {"fullest_expert": fullest(shares, experts), "fullest_owner": fullest(shares, 8)}
    return found | {f"ranks_{n}": n * fullest(shares.unflatten(0, (-1, n)).mean(1), n) for n in (8, 64)}


def routing(steps: int) -> dict[str, Any]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(trained, *zip(*ROUTERS, strict=True), repeat(steps)))
    said, rows = [], []
    for (experts, chosen, auxiliary), (how, routed) in zip(ROUTERS, done, strict=True):
        names = {"experts": experts, "chosen": chosen, "auxiliary": auxiliary}
        said.append(names | how)
        torch.manual_seed(0)
        ways = [(key, routed, segments) for key, segments in PIECES.items()]
        if auxiliary == 0.001:
            ways.append(("uniform", [torch.rand(1, 100_000, experts).topk(chosen).indices], 1))
        for tokens, (key, of, segments) in product(PACKS, ways):
            row = names | {"documents": key, "tokens": tokens, "expected": 1 - (1 - chosen / experts) ** tokens}
            rows.append(row | count(of, experts, tokens, segments))
    return {"models": said, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Elements of all layers' `experts`, `among` of which a layer has, and of all `others`. FLOPs are of forward and
    backward, its GPU's FLOP/s as reached.
    """

    layers: int
    hidden: int
    among: int
    chosen: int
    experts: int
    others: int
    other_flops: float  # of a token, and of a document's length squared
    squared_flops: float
    flops_s: float
    memory_s: float

    @classmethod
    def of(cls, model: Model, kind: GpuKind) -> Mixture:
        c, k = model.module.config, model.module.config.num_experts_per_tok
        experts = 3 * c.hidden_size * c.moe_intermediate_size * c.num_experts * model.layers
        sizes = {"layers": model.layers, "hidden": c.hidden_size, "among": c.num_experts, "chosen": k}
        sizes |= {"experts": experts, "others": model.parameters - experts, "squared_flops": model.cost.quadratic}
        rates = {"flops_s": EFFICIENCY * 1e12 * kind.tflops, "memory_s": 1e9 * kind.memory_gbs}
        return cls(**sizes, **rates, other_flops=model.cost.linear - 6 * experts * k / c.num_experts)

    def work_s(self, pack: Pack, tokens: float, held: float) -> tuple[float, float]:
        """Forward, and backward, of a pack, whose experts compute `tokens` by the share `held` of them all, or read
        these from memory in each pass, and read and write their gradients' sums, if that takes longer.
        """
        other_s = sum((self.other_flops + self.squared_flops * each) * each for each in pack) / self.flops_s / 3
        forward_s = 2 * self.experts * self.chosen / self.among * tokens / self.flops_s
        held_s = held * self.experts / self.memory_s
        backward_s = max(2 * forward_s, (READ + 2 * ADDED) * held_s)
        return other_s + max(forward_s, READ * held_s), 2 * other_s + backward_s


def ours(of: Mixture, links: Links, packs: Sequence[Pack], hit: float, weights: float = 0, sums: float = 0) -> Found:
    """Of a rank. `weights`, `sums`: shares of the layers whose experts, and gradients' sums, are kept for the
    minibatch. Copies overlap with all but a layer's work at both ends.
    """
    seconds = moved = 0.0
    for at, pack in enumerate(packs, 1):
        first, last = at == 1, at == len(packs)
        again = of.others + of.experts * hit * (1 - weights)
        added = of.others + of.experts * (hit * (1 - sums) + sums * last)
        sizes = READ * (again + of.experts * weights * first), READ * again + ADDED * added  # forward, backward
        for size, work_s, end in zip(sizes, of.work_s(pack, sum(pack), hit), (first, last), strict=True):
            copy_s = of.layers * links.read_s(size / of.layers)
            seconds += max(work_s, copy_s) + end * copy_s / of.layers
            moved += size * (links.gpus - 1) / links.gpus
    shard = (of.others + of.experts) / links.gpus
    return seconds + links.replicas_s(ADDED * shard) + links.replicas_s(READ * shard), moved


def reached(of: Mixture, places: int) -> float:
    """To how many other places, each with as many experts, uniform routing sends a token: once to each."""
    return (places - 1) * (1 - math.comb(of.among - of.among // places, of.chosen) / math.comb(of.among, of.chosen))


def parallel(of: Mixture, links: Links, ranks: Ranks, hosts: int, uneven: float, *, overlap: bool) -> Found:
    """Of expert parallelism over the GPUs of `hosts` hosts. In each layer all wait for the longest pack, and for the
    rank with `uneven` times an even share of tokens. `overlap`: tokens' exchange overlaps with all computation.
    """
    seconds = moved = 0.0
    for packs in zip(*ranks, strict=True):
        tokens = statistics.mean(map(sum, packs))
        work_s = max(sum(of.work_s(pack, tokens * uneven, 1 / links.gpus / hosts)) for pack in packs)
        sent = 2 * of.hidden * tokens * reached(of, links.gpus) * uneven  # bf16
        exchange_s = sent / (1e9 * links.gbs) + links.latency_s
        if hosts > 1:
            sent = 2 * of.hidden * tokens * reached(of, hosts) * uneven
            exchange_s = max(exchange_s, sent / (1e9 * links.nic_gbs)) + links.nic_latency_s
        exchange_s *= 4 * of.layers  # there and back, forward and backward
        seconds += max(work_s, exchange_s) if overlap else work_s + exchange_s
        moved += 4 * of.layers * sent
    shared = of.others + of.experts * (hosts < links.nodes)  # that more than one host has
    for size, behind_s in ((READ, work_s / 3), (ADDED, work_s * 2 / 3)):  # of the first forward, the last backward
        sum_s = links.collective_s(size * of.others) + links.replicas_s(size * shared / links.gpus)
        seconds += max(0.0, sum_s - behind_s)
        moved += size * of.others * (links.gpus - 1) / links.gpus
    return seconds, moved


def predict(
    of: Mixture, links: Links, tokens: int, packs: int, kept: Sequence[float], uneven: Sequence[float]
) -> dict[str, Any]:
    """Means over minibatches of full packs, whose last document is cut, of the slowest rank. Experts are hit as by
    uniform routing. `kept`: what fits into memory; `uneven`: in a host, and over all.
    """
    hit = 1 - (1 - of.chosen / of.among) ** tokens
    numbers, lengths, drawn = random.Random(0), named_lengths("longalign", 4096), []
    shares = {"whole": (1.0,), "per_pack": (hit,), "weights": (hit, 1.0), "half": (hit, 0.5, 0.5)}
    shares |= {"all": (hit, 1.0, 1.0), "fits": (hit, *kept)}

    def filled() -> list[int]:
        pack: list[int] = []
        while left := tokens - sum(pack):
            pack.append(min(left, numbers.choice(lengths)))
        return pack

    for _ in range(DRAWS):
        cost = partial(of.work_s, tokens=tokens, held=1.0)  # heavy packs line up, as by LB-Micro
        ranks = [sorted((filled() for _ in range(packs)), key=cost) for _ in range(links.ranks)]
        found = {way: max(ours(of, links, each, *share) for each in ranks) for way, share in shares.items()}
        found["compute"] = max(ours(of, Links.none(links.gpus), each, hit) for each in ranks)
        hosts = [ranks[at : at + links.gpus] for at in range(0, len(ranks), links.gpus)]
        for way, times, over in (("ep", uneven, False), ("ep_overlap", uneven, True), ("ep_ideal", (1.0, 1.0), True)):
            found[f"{way}_host"] = max(parallel(of, links, each, 1, times[0], overlap=over) for each in hosts)
            found[way] = min(found[f"{way}_host"], parallel(of, links, ranks, links.nodes, times[1], overlap=over))
        drawn.append(found)
    means = [{way: statistics.mean(each[way][at] for each in drawn) for way in drawn[0]} for at in (0, 1)]
    return {"tokens": tokens, "packs": packs, "seconds": means[0], "bytes": means[1]}


def gpus(counted: dict[str, Any]) -> list[dict[str, Any]]:
    """`counted`: of `routing`, whose packs of 4,096 tokens say how uneven ranks are."""
    with torch.device("meta"):  # Qwen3.5-35B-A3B by transformers' defaults; cut and on H100s as in DeepSpeed's PR 8064
        whole, cut = (AutoModelForCausalLM.from_config(Qwen3_5MoeTextConfig(num_hidden_layers=n)) for n in (40, 20))
    models, rows = [Model.find("qwen3-30b-a3b"), Model.of(whole, name="qwen3.5-35b-a3b")], []
    jobs = [(model, "h200", nodes, product(TOKENS, MINIBATCHES)) for model in models for nodes in (1, 8)]
    for model, name, nodes, sizes in [*jobs, (Model.of(cut, name="20 layers"), "h100", 2, [(1024, 4)])]:
        kind = find_device(name)
        of, links = Mixture.of(model, kind), usual_links(kind, 8, nodes=nodes, nic_gbs=NIC_GBS)
        states = model.memory("odc", shards=8, ranks=links.ranks, checkpointing=True).total_bytes
        copies = of.experts * (links.gpus - 1) / links.gpus
        room = (1e9 * (kind.memory_gb - SPARE_GB) - states) / copies
        # Weights first: a byte of them saves more.
        kept = [min(1.0, max(0.0, each)) for each in (room / READ, (room - READ) / ADDED)]
        names = {"model": model.name, "gpus": links.ranks, "states_bytes": states, "all_bytes": (READ + ADDED) * copies}
        names |= {"fits_weights": kept[0], "fits_sums": kept[1]}
        wanted = {"experts": of.among, "chosen": of.chosen, "auxiliary": 0.01, "documents": "several", "tokens": 4096}
        (row,) = [each for each in counted["rows"] if wanted.items() <= each.items()]
        rows += [names | predict(of, links, *each, kept, (row["ranks_8"], row["ranks_64"])) for each in sizes]
    return rows


if __name__ == "__main__":
    options = options_of(__doc__, steps=1000)
    out = options.out or RESULTS / "expert_counts.json"
    save_parts(out, routing=(found := routing(options.steps)), gpus=gpus(found), **about())
