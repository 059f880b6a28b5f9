"""Of docs/scale.md the tables of mixtures of experts: which experts a pack hits, and seconds of a minibatch."""

from __future__ import annotations

from .results import markdown, read

MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "qwen3.5-35b-a3b": "Qwen3.5-35B-A3B"}
KINDS = ((64, 4), (128, 8), (256, 8))  # experts, of which a token chooses
ROUTING = {"uniform": 0.001, "one": 0.01, "several": 0.01}  # documents, and the weight of the auxiliary loss
WAYS = {
    "whole": "gathered",
    "fits": "cache that fits",
    "all": "cache of all",
    "ep": "expert parallelism",
    "ep_ideal": "the same, ideal",
}

ASSUMED = """\
- Experts are bf16, and read in forward and backward; gradients are added in fp32. All experts are hit.
- GPUs reach half of their peak FLOP/s. Copies overlap with computation.
- Reads are 1.9 times slower, as readers share ports; the exchange of tokens is not. 45 GB/s between hosts.
- Packs are full of LongAlign-like documents, whose last one is cut.
- ODC has a copy of the model in each host, and adds the gradients of hosts at the end.
- Expert parallelism is the faster of 8 ranks in each host and of all ranks. It sends a token once to each rank or host
  that has one of its experts, in bf16, at DeepEP's rate between hosts.
- "Ideal" has the same number of tokens on each rank, and hides their exchange behind all computation.
- The small models are Qwen3-MoEs of 4 layers and 128 features, trained for 1,000 steps with an auxiliary loss of 0.01.
"""


def data() -> dict:
    return read("expert_counts.json")


def table(data: dict) -> str:
    hit = {
        (row["experts"], row["chosen"], row["auxiliary"], row["documents"], row["tokens"]): row["hit"]
        for row in data["routing"]["rows"]
    }
    hits = [
        [
            f"{tokens:,}",
            *(
                " / ".join(
                    f"{hit[(*kind, auxiliary, documents, tokens)]:.0%}" for documents, auxiliary in ROUTING.items()
                )
                for kind in KINDS
            ),
        ]
        for tokens in (16, 64, 256, 1024, 4096)
    ]
    seconds = [
        [
            MODELS[row["model"]],
            f"{row['gpus']}",
            f"{row['tokens'] // 1024}K × {row['packs']}",
            *(f"{row['seconds'][way]:.2f}" for way in WAYS),
        ]
        for row in data["gpus"]
        if row["model"] in MODELS
    ]
    return (
        "The share of a layer's experts that a pack hits: uniform routing / as small trained models route packs of one "
        "document / of eight:\n\n"
        f"{markdown(('tokens of a pack', *(f'{n} experts, top {k}' for n, k in KINDS)), hits)}\n"
        "Predicted seconds of a minibatch on H200s in hosts of 8, of which every rank has some packs:\n\n"
        f"{markdown(('model', 'GPUs', 'tokens × packs of a rank', *WAYS.values()), seconds)}\n{ASSUMED}"
    )
