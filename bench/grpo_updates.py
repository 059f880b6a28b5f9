"""The time of one update of GRPO on the same completions, three ways side by side: FSDP2, ODC, split ODC.

Completions are as long as a model that sorts makes them: eight of each prompt. The objective is GRPO's, and every
other completion of a pack has the advantage 1, the others -1: what they are costs no time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import torch

from odc_triton.comm.launch import launch
from odc_triton.data.dataset import DataOptions, tokenize_file
from odc_triton.data.tokenizer import TextEncoder, read_tokenizer
from odc_triton.hf.loss import predictions
from odc_triton.nn.head import log_probs
from odc_triton.rl.objective import Objective, TokenTerms

from . import quiet
from .harness import Work, compare, disturbed
from .sorting import CONFIG
from .variants import Fsdp2, Odc, OdcSplit, Pack, Variant

MINIBATCHES, WARM_UP, PROMPTS, GENERATIONS = 20, 1, 32, 8
TOKEN_CAP = 2048
OBJECTIVE = Objective(loss="dr_grpo", low=0.2, high=0.2)


class _Grpo(Variant):
    """Any variant with the objective of GRPO."""

    json_name: ClassVar[str]

    def loss(self, pack: Pack) -> torch.Tensor:
        logits, targets = predictions(self.model, pack)
        logp = log_probs(logits, targets).logp
        documents = torch.bucketize(pack["target_positions"], pack["cu_seq_lens_q"][1:], right=True)
        signs = 1.0 - 2.0 * (documents % 2)
        counts = documents.bincount().tolist()
        terms = TokenTerms(counts=counts, advantage=signs, weight=torch.ones_like(logp), old=logp.detach())
        return OBJECTIVE(logp, terms)[0]


class GrpoFsdp2(_Grpo, Fsdp2):
    json_name = "fsdp2_global_packing"


class GrpoOdc(_Grpo, Odc):
    json_name = "odc_lb_mini"


class GrpoOdcSplit(_Grpo, OdcSplit):
    json_name = "odc_split"


KINDS = (GrpoFsdp2, GrpoOdc, GrpoOdcSplit)


def _work(folder: Path) -> Work:
    """The completions of `MINIBATCHES` rollouts of 32 prompts, right ones, as samples."""
    records = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    records = records[: (MINIBATCHES + WARM_UP) * PROMPTS]
    lines = [json.dumps({"prompt": each["prompt"], "completion": each["answer"]}) for each in records]
    text = folder / "completions.jsonl"
    text.write_text("".join(f"{line}\n" * GENERATIONS for line in lines))
    encoder = TextEncoder.of(read_tokenizer(folder / "tokenizer.json"))
    data = tokenize_file(text, encoder, DataOptions(max_tokens=TOKEN_CAP))
    data.save(folder / "completions.npz")
    samples = list(range(len(data)))
    of_step = PROMPTS * GENERATIONS
    minibatches = [samples[start : start + of_step] for start in range(0, len(samples), of_step)]
    config = {name: value for name, value in CONFIG.items() if name not in ("model_type", "architectures")}
    return Work(dataset=str(folder / "completions.npz"), config=config, minibatches=minibatches, token_cap=TOKEN_CAP)


def measure_updates(folder: Path, *, ranks: int) -> dict[str, Any]:
    """Seconds of each minibatch but the first, by variant, and what disturbed them."""
    results = launch(compare, KINDS, _work(folder), True, WARM_UP, ranks=ranks)[0]
    return {
        "seconds": {kind.json_name: one.seconds[WARM_UP:] for kind, one in zip(KINDS, results, strict=True)},
        "microbatches": {kind.json_name: one.microbatches[WARM_UP:] for kind, one in zip(KINDS, results, strict=True)},
        "disturbed": disturbed(results, WARM_UP),
        "most_waiting": quiet.MOST_WAITING,
        "token_cap": TOKEN_CAP,
        "completions": PROMPTS * GENERATIONS,
    }
