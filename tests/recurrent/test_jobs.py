"""`train sft` and `train grpo` of hybrids: split samples, shared prefixes, completions of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.recurrent.layers import most_cuts_of
from odc_triton.sequence.buffers import CUTS
from tests.support import jobs, slow
from tests.support.families import causal_lm
from tests.support.grpo_case import write_prompts
from tests.support.hybrids import CONFIGS, hybrid
from tests.support.jobs import ENDED
from tests.support.sft_case import write_questions
from tests.support.versions import RECURRENT
from tests.train import test_grpo, test_grpo_job, test_jobs

# AdamW makes whole updates of the small gradients of decays, whose rounding differs.
SFT = test_jobs.Job(learned=test_jobs.SHARED | test_jobs.EVALUATED, how=test_jobs.SPLIT, rtol=5e-4)
MORE = {
    "four ranks": replace(SFT, shape=(1, 4), stopped=(1, 2)),
    "checkpointing": replace(SFT, how=SFT.how | {"gradient_checkpointing": True}, shape=(1, 4)),
}


@RECURRENT
@pytest.mark.parametrize(("name", "table"), [("qwen3_5", {"two ranks": SFT}), *(slow(name, MORE) for name in CONFIGS)])
def test_sft_as_on_one_rank(name: str, table: dict[str, test_jobs.Job], tmp_path: Path) -> None:
    folder = write_questions(tmp_path / "case")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | CONFIGS[name]))
    test_jobs.test_as_on_one_rank(folder, tmp_path, table)


@RECURRENT
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_grpo_as_on_one_rank_and_by_trl(name: str, tmp_path: Path) -> None:
    """With the model's own completions; with recorded ones by TRL's loss on the plain model."""
    folder = write_prompts(tmp_path / "case", prompts=7, config=CONFIGS[name])
    two = test_grpo_job.options(folder, tmp_path / "two", split_sequences=True, split_tokens=60)
    one = replace(two, out=str(tmp_path / "one"), prompts_per_rank=4)
    assert jobs.run(2, two, replace(two, out=str(tmp_path / "overlapped"), overlap_rollout="on")) == [ENDED] * 2
    assert jobs.run(1, one) == [ENDED]
    want = read_metrics(tmp_path / "one" / "metrics.jsonl")
    assert all(abs(line["ratio"] - 1) < 1e-4 for line in want), "completions are of the policy itself"
    for out in ("two", "overlapped"):
        test_grpo_job.same(read_metrics(tmp_path / out / "metrics.jsonl"), want)
    named = ("dapo, split", "dapo, over the cap, overlapped", "gspo twice, temperature", "dr_grpo, no scale, kl")
    cases = {key: test_grpo.CASES[key] for key in named}
    test_grpo.test_steps_are_trls(folder, tmp_path, cases, 2)


def test_places_to_go_on_at() -> None:
    """As many as may be needed, also of a teacher alone; a wish counts for hybrids only."""
    plain, recurs = causal_lm("Qwen2"), hybrid("qwen3_5", dtype=torch.float32)
    found = [most_cuts_of(models, 81, wanted) for models in ([plain], [plain, recurs]) for wanted in (0, 3)]
    assert found == [None, None, 81, 3]
    assert most_cuts_of([recurs, None], 1, 0) == CUTS
