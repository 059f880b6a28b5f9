"""Mixtures of experts, counted before any kernel: which experts a pack hits, and what each way moves. No GPU is used.

    python -m bench.suites.expert_counts [--out bench/results/expert_counts.json] [--only routing gpus]

`routing`: the share of a layer's experts that a pack hits, and how uneven they are, with uniform routing and as a small
Qwen3-MoE routes text that it was not trained on. It is trained here, in minutes, on this repository's pages and code.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ..provenance import RESULTS, ROOT, about, save_parts

PACKS = (16, 32, 64, 128, 256, 512, 1024, 4096)  # tokens
PIECES = {"one": 1, "several": 8}  # documents of a pack
OWNERS = 8
_SOURCES = ("docs/**/*.md", "odc_triton/**/*.py", "kernels/**/*.py", "tests/**/*.py", "bench/**/*.py")
_CONFIG = {"vocab_size": 4096, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32}
_CONFIG |= {"num_key_value_heads": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "tie_word_embeddings": True}
_CONFIG |= {"output_router_logits": True}


@dataclass(frozen=True, kw_only=True)
class Router:
    """`auxiliary`: the coefficient of its loss for balance; transformers' default for these families is 0.001, the
    example in Megatron Core's README has 0.01.
    """

    experts: int
    chosen: int
    auxiliary: float = 0.001
    steps: int = 1000


MIXTURES = ((64, 4), (128, 8), (256, 8))
ROUTERS = [Router(experts=e, chosen=k, auxiliary=weight) for e, k in MIXTURES for weight in (0.001, 0.01)]
ROUTERS.append(Router(experts=128, chosen=8, auxiliary=0.0))


def documents() -> tuple[list[Tensor], list[Tensor]]:
    """Tokens of each file: to train on, and, of each fifth, to count."""
    files = sorted({path for pattern in _SOURCES for path in ROOT.glob(pattern)})
    texts = [text for path in files if (text := path.read_text(encoding="utf-8"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_CONFIG["vocab_size"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text for at, text in enumerate(texts) if at % 5], trainer)
    tokens = [torch.tensor(each.ids) for each in tokenizer.encode_batch(texts)]
    return [each for at, each in enumerate(tokens) if at % 5], tokens[::5]


def trained(router: Router) -> tuple[dict[str, Any], list[Tensor]]:
    """How training went, and the experts of each token of each document that was kept out: [layers, tokens, chosen]."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, kept = documents()
    how = {"num_experts": router.experts, "num_experts_per_tok": router.chosen}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**_CONFIG, **how, router_aux_loss_coef=router.auxiliary))
    model.set_experts_implementation("grouped_mm")
    text, length = torch.cat(train), 256
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=router.steps)
    start_s, losses = time.monotonic(), []
    for _ in range(router.steps):
        starts = torch.randint(0, len(text) - length, (4, 1))
        ids = text[starts + torch.arange(length)]
        found = model(input_ids=ids, labels=ids, use_cache=False)
        found.loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(found.loss.item() - router.auxiliary * found.aux_loss.item())
    routed, kept_losses = [], []
    with torch.no_grad():
        for ids in kept:
            parts = []
            for part in ids.split(1024):
                found = model(input_ids=part[None], labels=part[None], use_cache=False)
                kept_losses.append(float(found.loss - router.auxiliary * found.aux_loss) if len(part) > 1 else math.nan)
                parts.append(torch.stack([each.topk(router.chosen).indices for each in found.router_logits]).short())
            routed.append(torch.cat(parts, 1))
    kept_loss = torch.tensor(kept_losses).nanmean().item()
    said = {"train_tokens": len(text), "kept_tokens": sum(map(len, kept)), "first_loss": losses[0]}
    said |= {"last_loss": statistics.mean(losses[-50:]), "kept_loss": kept_loss, "took_s": time.monotonic() - start_s}
    return said, routed


def draw(routed: Sequence[Tensor], tokens: int, pieces: int, numbers: random.Random) -> Tensor:
    """A pack of as many tokens of each of `pieces` documents, from anywhere within them."""
    each = tokens // pieces
    found = numbers.choices([document for document in routed if document.shape[1] >= each], k=pieces)
    starts = [numbers.randint(0, document.shape[1] - each) for document in found]
    return torch.cat([document[:, at : at + each] for document, at in zip(found, starts, strict=True)], 1)


def loads(pack: Tensor, experts: int) -> Tensor:
    """The share of (token, expert) pairs that each expert of each layer has: [layers, experts]."""
    flat = pack.flatten(1).long()
    return torch.zeros(len(flat), experts).scatter_add_(1, flat, torch.ones(flat.shape)) / flat.shape[1]


def fullest(shares: Tensor, owners: int) -> Tensor:
    """The share of the fullest of `owners`, which have equally many experts in order, in each layer."""
    return shares.unflatten(1, (owners, -1)).sum(2).amax(1)


def uniform_hits(experts: int, chosen: int, tokens: int) -> float:
    """The expected share of experts that are hit if each token chooses any `chosen` different ones."""
    return 1 - (1 - chosen / experts) ** tokens


def count(routed: Sequence[Tensor], experts: int, tokens: int, pieces: int, *, draws: int = 128) -> dict[str, Any]:
    """Means over layers and packs; `low` and `high`: 10% and 90% of packs, each the mean of its layers. `ranks_8`: the
    fullest of 8 owners' share over 8 such packs, one a rank, in times of an even one; `ranks_64`: of 64 over 64.
    """
    numbers = random.Random(0)
    shares = torch.stack([loads(draw(routed, tokens, pieces, numbers), experts) for _ in range(draws)])
    hits = (shares > 0).float().mean(2)
    low, high = hits.mean(1).quantile(torch.tensor([0.1, 0.9])).tolist()
    found = {"hit": hits.mean().item(), "low": low, "high": high, "hit_by_layer": hits.mean(0).tolist()}
    found |= {"fullest_expert": shares.amax(2).mean().item()}
    found |= {"fullest_owner": torch.stack([fullest(each, OWNERS) for each in shares]).mean().item()}
    for ranks in (8, 64):
        together = shares.unflatten(0, (-1, ranks)).mean(1)
        found[f"ranks_{ranks}"] = ranks * torch.stack([fullest(each, ranks) for each in together]).mean().item()
    return found


def routing() -> dict[str, Any]:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        done = list(pool.map(trained, ROUTERS))
    models, rows = [], []
    for router, (said, routed) in zip(ROUTERS, done, strict=True):
        names = {"experts": router.experts, "chosen": router.chosen, "auxiliary": router.auxiliary}
        models.append(names | {"steps": router.steps} | said)
        torch.manual_seed(0)
        chances = torch.rand(1, 100_000, router.experts).topk(router.chosen).indices
        for tokens in PACKS:
            hit = uniform_hits(router.experts, router.chosen, tokens)
            ways = [(key, routed, pieces) for key, pieces in PIECES.items()]
            ways += [("uniform", [chances], 1)] if router.auxiliary == 0.001 else []
            for key, of, pieces in ways:
                row = names | {"documents": key, "tokens": tokens, "expected": hit}
                rows.append(row | count(of, router.experts, tokens, pieces))
    return {"models": models, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "expert_counts.json", help="JSON file, whose other keys stay"
    )
    parser.add_argument("--only", choices=("routing", "gpus"), nargs="+", default=("routing", "gpus"))
    options = parser.parse_args(arguments)
    for part in options.only:
        found = {"routing": routing}[part]()
        save_parts(options.out, **{part: found, f"{part}_about": about()})


if __name__ == "__main__":
    main()
