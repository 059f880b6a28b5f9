"""`--compile`: the same losses, by a few graphs for packs of any length."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from odc_triton.jobs.train import job
from odc_triton.jobs.train.model import compile_blocks
from tests.support import jobs
from tests.support.sft_case import case, write_case


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compilers
@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("aot_eager", {"gradient_checkpointing": True}),
        ("aot_eager", {"replace_layers": True, "lora_rank": 2}),
        ("inductor", {"eval_fraction": 0.2, "eval_every": 20}),
    ],
)
def test_losses_and_graphs(tmp_path: Path, backend: str, changes: dict[str, object]) -> None:
    """Inductor sums in another order; Adam makes more of that."""
    write_case(tmp_path)
    lengths = set()

    def compiled(model: torch.nn.Module) -> None:
        compile_blocks(model, backend)
        model.register_forward_pre_hook(lambda _, __, given: lengths.add(given["input_ids"].shape[1]), with_kwargs=True)

    torch._dynamo.reset()
    counters.clear()
    for name in ("plain", "compiled"):
        wanted = {"out": str(tmp_path / name), "compile": name == "compiled", "samples_per_rank": 5, "steps": 50}
        with mock.patch.object(job, "compile_blocks", compiled):
            assert jobs.train(0, 1, [case(tmp_path, **wanted | changes)]) == [jobs.ENDED]
    assert len(lengths) >= 50
    assert 0 < counters["stats"]["unique_graphs"] <= 8
    want, got = (torch.tensor(jobs.losses(tmp_path / name)) for name in ("plain", "compiled"))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
