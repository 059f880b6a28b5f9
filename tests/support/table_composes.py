"""The table of what composes with what: features of training, how each is switched on, and the pairs refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from tests.support.tables import Table


@dataclass(frozen=True, kw_only=True)
class Feature:
    """`how`: what switches it on; `options`: those of a run of SFT that do so."""

    how: str
    options: dict[str, Any] = field(default_factory=dict)


CAP = 400  # tokens of a pack, which is several samples
FEW_CAP = 160  # one or two samples: of each number of them there is another graph
SPLIT_CAP = 72  # the longest sample has more

FEATURES = {
    "LoRA": Feature(how="`--lora-rank`", options={"lora_rank": 4}),
    "Muon": Feature(how="`--optimizer muon`", options={"optimizer": "muon"}),
    "background checkpoints": Feature(
        how="`--checkpoint-background`", options={"checkpoint_every": 2, "checkpoint_background": True}
    ),
    "checkpointing": Feature(how="`--gradient-checkpointing`", options={"gradient_checkpointing": True}),
    "compile": Feature(how="`block.compile()`", options={"token_cap": FEW_CAP}),
    "bf16": Feature(how="`--dtype bf16`", options={"dtype": "bf16"}),
    "replaced layers": Feature(
        how="`--replace-layers --fused-head`", options={"replace_layers": True, "fused_head": True}
    ),
    "split": Feature(how="`--split-sequences`", options={"split_sequences": True, "token_cap": SPLIT_CAP}),
    "exact": Feature(how="`--exact`", options={"exact": True}),
    "replicas": Feature(how="`--replicas`", options={"replicas": 2}),
    "queue": Feature(how="`--balance queue`", options={"balance": "queue"}),
    "one base": Feature(how="`fully_shard(base=)`", options={"lora_rank": 4}),
    "bridge": Feature(how="`use_odc`"),
    "hybrid": Feature(how="`qwen3_5_text`"),  # a model whose layers are partly recurrent
}
Pair = tuple[str, str]
PAIRS: list[Pair] = list(combinations(FEATURES, 2))

# What the refusal says, a part of it, and the cell's words.
_OURS = "needs a model of odc_triton.fully_shard"
_WHY = "no: it needs `odc_triton.fully_shard`, and `use_odc` keeps FSDP2's sharding"
REFUSED: dict[Pair, tuple[str, str]] = {
    ("Muon", "bridge"): ("was not sharded by odc_triton.fully_shard", _WHY),
    ("background checkpoints", "bridge"): (_OURS, _WHY),
    ("split", "bridge"): (_OURS, _WHY),
    ("one base", "bridge"): (_OURS, _WHY),
    ("exact", "bridge"): ("for exact sums shard it by odc_triton.fully_shard", _WHY),
}


def _expected(row: str, column: str) -> str | None:
    if row == column:
        return None
    pair = (row, column) if (row, column) in PAIRS else (column, row)
    return REFUSED[pair][1] if pair in REFUSED else "yes"


COMPOSES = Table(
    name="composes",
    columns=tuple(FEATURES),
    rows=tuple((name, feature.how) for name, feature in FEATURES.items()),
    expected=_expected,
    symmetric=True,
)
