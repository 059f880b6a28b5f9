"""A run without memory for what it needs says how much that is, and what would need less."""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from odc_triton import memory_plan
from odc_triton.jobs.train.model import add_adapters
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.tools.cli import start
from odc_triton.tools.memory.advice import advising
from tests.support.families import causal_lm
from tests.support.ranks import in_own_process
from tests.support.sft_case import case, write_case


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        (lambda: torch.empty(2**60), RuntimeError),
        (lambda: mmap.mmap(-1, 2**60), OSError),
        (lambda: bytearray(2**60), MemoryError),
    ],
)
def test_what_needs_less_is_said(
    tmp_path: Path, fails: Callable[[], object], kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    causal_lm("Qwen2").save_pretrained(folder := write_case(tmp_path))
    options = case(folder, init=None, model=str(folder), lora_rank=2, gradient_checkpointing=True)
    model = add_adapters(causal_lm("Qwen2"), rank=2, alpha=None, targets="all-linear")
    planned = memory_plan(model, 2, tokens_per_microbatch=256, gradient_checkpointing=True).total_bytes / 1e9
    with pytest.raises(RuntimeError, match=f"predicts {planned:.3g} GB per rank") as failed:
        advising(options, 2)(fails)()
    assert type(failed.value.__cause__) is kind
    first = str(failed.value).splitlines()[0]
    assert f"odc-triton: {first} Looking for what needs less memory\n" in capsys.readouterr().err
    less = {words: float(number) for words, number in re.findall(r"(--[^:]*): ([\d.e-]+) GB", str(failed.value))}
    assert {"--token-cap 128", "--dtype bf16"} <= less.keys()
    assert "--gradient-checkpointing" not in less
    assert [*less.values()] == sorted(less.values())
    assert max(less.values()) < 0.96 * planned
    (folder / "config.json").unlink()  # nothing can be planned
    with pytest.raises(kind, match=r"^(?!.*memory_plan)"):
        advising(options, 2)(fails)()


def test_a_large_mixture_is_planned_without_memory(tmp_path: Path) -> None:
    """A layer has experts of 200 GB, which a small stand-in for the model would have, too."""
    wide = {"hidden_size": 2**16, "moe_intermediate_size": 2**16, "num_experts": 4, "num_experts_per_tok": 2}
    config = transformers.Qwen3MoeConfig(**wide, num_hidden_layers=1, vocab_size=512)
    (folder := write_case(tmp_path)).joinpath("config.json").write_text(config.to_json_string())
    with pytest.raises(RuntimeError) as failed:
        advising(case(folder), 8)(lambda: torch.empty(2**60))()
    says = r"activations, which --gradient-checkp.* and a smaller --token-cap would lower\. Less with --lora-rank 16: "
    assert re.search(says, str(failed.value)), failed.value


def check_before_start(*_: object) -> None:
    pass


def run(_: SftOptions) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + 2**26, resource.RLIM_INFINITY))
    torch.empty(2**29, dtype=torch.uint8)


def _started(options: SftOptions) -> str:
    with pytest.raises(RuntimeError) as failed:
        start.start_job(__name__, "run", options, ranks=2)
    return str(failed.value)


@pytest.mark.slow
def test_ranks_that_can_not_allocate(tmp_path: Path) -> None:
    said = in_own_process(_started, case(write_case(tmp_path)))
    assert re.search(r"allocate memory: .*\nmemory_plan predicts .* per rank.* Less with .*--gradient-checkp", said), (
        said
    )
