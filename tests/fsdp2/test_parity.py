"""Models of torch's own `fully_shard` train under `use_odc` as plain torch trains them in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support import ranks
from tests.support.bridged import DEALS, bridged, plain

STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """`replicas`: groups of ranks that each hold the model (HSDP)."""

    name: str
    transform: str = ""
    layout: str = "blocks"
    world: int = 3
    kind: str = "sgd"
    replicas: int = 1
    backend: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    automatic: bool = False

    def __str__(self) -> str:
        words = [self.name, self.transform, self.layout, f"{self.world} ranks", self.kind, self.backend]
        words += ["automatic"] * self.automatic
        words += [f"{self.replicas} replicas"] * (self.replicas > 1) + [f"{k}={v}" for k, v in self.options.items()]
        return ", ".join(word for word in words if word)


RESHARD = {"reshard_after_forward": True}
CASES = [
    Case(name="qwen2", layout="titan", evaluates=True),
    Case(name="qwen2", transform="frozen", world=4, replicas=2),
    Case(name="qwen2", transform="lora", world=2, kind="adamw"),
    Case(name="gpt2-tied", layout="root", world=2),
    Case(name="qwen3-moe", transform="experts", world=2),  # with transformers' own forward
    Case(name="qwen2", transform="checkpointing", backend="cpu-sharded", options=RESHARD),
    Case(name="branches", backend="cpu-interpreter", world=2),
    Case(name="branches", world=4, options={"reshard_after_forward": 2}),
    Case(name="qwen2", layout="columns", world=4, replicas=2, kind="adamw"),
    Case(name="qwen2", layout="titan", evaluates=True, automatic=True),
    Case(name="gpt2-tied", layout="root", world=2, automatic=True),
    Case(name="qwen2", transform="lora", world=2, kind="adamw", automatic=True),
    Case(name="qwen2", transform="checkpointing", backend="cpu-sharded", options=RESHARD, automatic=True),
    Case(name="branches", world=4, replicas=2, automatic=True),
]


def _call(case: Case) -> tuple:
    how = (case.name, case.transform, case.kind, STEPS, case.layout, case.replicas)
    return bridged, *how, case.backend, case.options, case.evaluates, case.automatic


@pytest.mark.parametrize("world", sorted({case.world for case in CASES}))
def test_as_plain_torch(world: int) -> None:
    cases, count = [case for case in CASES if case.world == world], sum(map(len, DEALS[world]))
    for case, results in zip(cases, ranks.run_all(world, *map(_call, cases)), strict=True):
        wanted, wanted_norms = plain(case.name, case.transform, case.kind, STEPS, count)
        weights, norms, _ = results[0]
        assert norms == pytest.approx(wanted_norms, rel=1e-5), case
        if case.kind == "sgd":  # every element: fp32 sums of other order, three times
            for name, weight in wanted.items():
                where = f"{case}: {name}: "
                torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-6, msg=lambda m, at=where: at + m)
        # AdamW turns rounding into steps where a gradient is all but 0, so by norm.
        difference = sum((weights[name] - weight).square().sum() for name, weight in wanted.items()).sqrt()
        assert difference <= 1e-5 * sum(weight.square().sum() for weight in wanted.values()).sqrt(), case
        evaluated = [losses for _, _, losses in results]
        assert [len(losses) for losses in evaluated] == [STEPS * (rank + 1) * case.evaluates for rank in range(world)]
        for rank, losses in enumerate(evaluated):
            assert losses == [loss for loss in evaluated[0] for _ in range(rank + 1)], case
