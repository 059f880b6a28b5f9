"""What a GPU is asked, in order of what it tells, what passes, what may then be said: written before any of it ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

LINES, LOG = "gpu.jsonl", "gpu.log"


@dataclass(frozen=True)
class Section:
    """`run`: module and function, which yields lines. `seconds`: it ends after these. `given`: its arguments, with the
    numbers of the rule that `passes` has in words. `says`: what a pass shows. `gpus`: it needs so many.
    `least`: it has passed once so many of its lines say so; 0: if it was not cut, either. `has_processes`: it starts
    its own, and gets the folder to write to and the seconds that are left.
    """

    run: str
    seconds: float
    passes: str
    says: str = "-"
    given: Mapping[str, Any] = field(default_factory=dict)
    gpus: int = 1
    least: int = 0

    @property
    def has_processes(self) -> bool:
        return self.run.startswith("programs.")

    def lines(self, gpu: Any, folder: Path, left_s: float) -> Iterator[dict[str, Any]]:
        module, _, name = self.run.rpartition(".")
        place = {"folder": folder, "seconds": min(left_s, self.seconds)} if self.has_processes else {}
        return getattr(import_module(f"{__package__}.{module}"), name)(gpu, **place, **self.given)


def _tests(name: str, seconds: float, *tests: str, least: int, workers: int, says: str = "-") -> Section:
    """Tests that are marked `gpu`. `least`: how many have to pass. `workers`: at most half as many as cores."""
    given = {"name": name, "tests": tests, "workers": workers, "least": least}
    return Section("programs.tests", seconds, f"all that ran pass, {least} or more", says, given, least=1)


def _of(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"tests/gpu/test_{file}.py::test_{name}" for name in names)


# One process or two: reading and adding to each other, split samples, a kill in a wait, ten steps, no host that waits.
TESTS = (
    *_of("cuda_heap", "ranks_read_each_other[2]"),
    *_of("cuda_heap", "additions_are_exact[spread-2-False]", "additions_are_exact[spread-2-True]"),
    *_of("cuda_split", "as_whole_samples[spread-Qwen2-zigzag]", "as_whole_samples[spread-Mistral-zigzag]"),
    *_of("cuda_split", "the_host_never_waits_in_a_microbatch"),
    *_of("cuda_split", "a_rank_killed_while_a_device_waits_for_it[publish-0]"),
    *_of("cuda_split", "bf16_is_as_good_as_on_whole_samples", "the_queries_are_the_last_of_their_keys[31-200-48]"),
    *_of("cuda_engine", "ten_steps_of_qwen2[spread-1]", "ten_steps_of_qwen2[spread-2]"),
    *_of("cuda_engine", *(f"replaced_layers[spread-2-{way}]" for way in ("layers", "direct", "staged"))),
    *_of("cuda_engine", "transformed[checkpointing]", "transformed[head]"),
    *_of("cuda_engine", "bf16_and_memory[2]", "exact_sums[2]"),
    *_of("cuda_steady", "no_host_waits[Qwen2-roles0-none-auto]", "no_host_waits[Llama-roles4-checkpointing-auto]"),
    *_of("cuda_steady", "microbatches_on_streams_of_their_own[2]", "launched_without_a_process_group[False]"),
    *_of("cuda_copies", "a_batch[2]"),
    *_of("killed", "killed[forward-0]"),
)
# Also of tests/kernels, and of others whose folder marks them as needing a GPU.
ALL_TESTS = ("tests/kernels", "tests/gpu", "tests/engine/test_gathered.py", "tests/engine/test_gathered_usage.py")
ALL_TESTS += ("tests/engine/test_foreach.py", "tests/hf/test_attention.py", "tests/balance/test_collate.py")

QUARTER = {
    "rates": Section(
        "parts.rates",
        20,
        "torch adds a product of bf16 into fp32 in place",
        "the card's own product and copy, as the yardstick",
    ),
    "right": Section(
        "parts.right",
        50,
        "17 operators as near to plain torch as their dtype allows, "
        "attention over 11 shared-prefix trees within 2e-2 of masked attention",
        "kernels are right on this GPU",
        {"most": 2e-2},
        least=26,
    ),
    "group 4096+8x512": Section(
        "updates.group",
        60,
        "gradients within 5%; more than 2.5 times as fast (by FLOPs 3.8 to 4.2)",
        "the ratio, seconds and GB of GRPO's update, ours and plain torch's",
        {"prompt": 4096, "completion": 512, "size": 8, "off": 0.05, "least": 2.5},
    ),
    "tests": _tests("tests", 95, *TESTS, least=20, workers=10, says="tested with two processes on one GPU; no speed"),
    "rows": Section(
        "updates.rows",
        110,
        "ODC has at least 0.97 of plain torch's speed",
        "tokens/s, GB and busy share of each way on one GPU; nothing of scaling",
        {"least": 0.97},
        least=1,
    ),
    "pair 3072+2x512": Section(
        "updates.group",
        45,
        "gradients within 5%; more than 1.3 times as fast (by FLOPs 1.6 to 1.7)",
        "the ratio, seconds and GB of DPO's update",
        {"prompt": 3072, "completion": 512, "size": 2, "of": 4, "off": 0.05, "least": 1.3},
    ),
    "head": Section(
        "parts.head",
        30,
        "less than 1/5 of the memory that full logits add",
        "milliseconds and GB of the fused head and of full logits",
        {"share": 0.2},
    ),
    "attention": Section(
        "parts.attention",
        20,
        "less than 2e-2 from one call, gradients too",
        "milliseconds of split attention and of one call",
        {"most": 2e-2},
    ),
    "recurrent": Section(
        "recurrent.recurrent",
        30,
        "four functions less than 2e-2 from torch on each sample alone, gradients too",
        "hybrids' packs and shared prefixes are right by these packages' kernels",
        {"most": 2e-2},
        least=4,
    ),
    "kernels": Section(
        "parts.kernels",
        60,
        "14 operators as near to plain torch as in `right`",
        "each operator's time next to cuBLAS and torch",
        least=12,
    ),
    "long": Section(
        "updates.long",
        60,
        "the loss in chunks and offloaded within 1e-3 of the first",
        "GB and seconds of 65,536 tokens on one GPU",
        {"tokens": 65536, "off": 1e-3},
    ),
    "group 1024+8x1024": Section(
        "updates.group",
        50,
        "gradients within 5%",
        "the ratio where completions are long",
        {"prompt": 1024, "completion": 1024, "size": 8, "off": 0.05},
    ),
}

OPERATORS = ("gather", "scatter", "exact publish", "embedding", "embedding_grad", "linear_cross_entropy")
OPERATORS += ("linear_cross_entropy_grad", "linear_divergence", "linear direct", "linear_dx direct", "linear staged")
OPERATORS += ("linear_dx staged", "wgrad", "qkv", "qkv_grad", "experts", "experts wgrad")

LONGER = {
    "all tests": _tests("all tests", 420, *ALL_TESTS, least=100, workers=14),
    "train": Section(
        "programs.train",
        150,
        "with one and two ranks, the last ten losses are on average at most 0.9 of the first ten",
        given={"steps": 100, "share": 0.9},
        least=2,
    ),
    # A fault costs one operator.
    **{
        f"sweep {name}": Section("parts.sweep", 60, "as in `right`, at every size", given={"operator": name})
        for name in OPERATORS
    },
    "memcheck": Section("programs.memcheck", 240, "compute-sanitizer finds no fault in `right`", least=1),
    "links": Section("programs.links", 300, "sums are exact between every pair", gpus=2, least=1),
    "lengths": Section("programs.lengths", 420, "every way to train ends, and first losses agree", gpus=2, least=1),
}
LISTS = {"quarter": QUARTER, "longer": LONGER}
