"""What `train sft` spends besides training: reading samples, saving checkpoints, preparing the data.

    python -m bench.reports.sft_costs [--ranks 2] [--steps 13] [--out FILE]

The demo's model, data and minibatches. Before each step a checkpoint is saved, at once or in the background; what
counts is how long the step waits for it. A thread writes the latter while the step runs. So each minibatch is taken
twice, once after each kind of checkpoint, and the ratio of the two times is what the writer costs. Which kind is first
alternates. Saving is given as its share of a run that saves once in 100 steps; the data are 10,000 records, prepared
once into an empty folder and then found again.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.train.sft_options import SftOptions

from ..demo import CONFIG, TOKEN_CAP
from ..harness import single_thread_environment
from ..provenance import about, options_of, save_json
from ..stdlib_corpus import build_corpus, write_text

RECORDS = 10_000
STEPS_PER_SAVE = 100
KINDS = AT_ONCE, BACKGROUND = "at once", "background"


def measure(options: SftOptions) -> dict[str, Any]:
    """On one rank: seconds of each step, of reading its samples, of each checkpoint. Collective."""
    import torch.distributed as dist

    from odc_triton.checkpoint.background import BackgroundCheckpoints
    from odc_triton.checkpoint.steps import Checkpoints
    from odc_triton.sharding.agree import default_mesh
    from odc_triton.sharding.shard import fully_shard
    from odc_triton.train.model import build_model, precision
    from odc_triton.train.run import Asked
    from odc_triton.train.sft import prepare
    from odc_triton.train.sft_run import SftRun

    class Timed(SftRun):
        reading_s: float = 0.0

        def next_packs(self) -> Any:
            start_s = time.perf_counter()
            packs = super().next_packs()
            self.reading_s += time.perf_counter() - start_s
            return packs

        def go_to(self, position: dict[str, int]) -> None:
            self.sampler.load_state_dict(position)
            self._epoch = iter(self.sampler)

    def timed(do: Callable[[], object]) -> float:
        dist.barrier()
        start_s = time.perf_counter()
        do()
        return time.perf_counter() - start_s

    mesh = default_mesh(timedelta(minutes=30))
    prepared = prepare(options, mesh=mesh)
    longest, largest_token = prepared.longest, prepared.largest_token
    model, cost = build_model(
        options, prepared.tokenizer, longest=longest, largest_token=largest_token, rank=mesh.get_rank()
    )
    model = fully_shard(model, mesh=mesh, mp_policy=precision(options.dtype))
    run = Timed(options=options, model=model, data=prepared.data, cost=cost, identity=prepared.identity)
    checkpoints = Checkpoints(Path(options.out) / "checkpoints", keep=options.keep)
    background = BackgroundCheckpoints(checkpoints, model=model)
    run.asked = Asked(writer=background.report, settle=background.settle)

    def save(kind: str) -> None:
        how = {"optimizer": run.optimizer, "state": run.position(), "step": run.state.step}
        if kind == BACKGROUND:
            background.save(**how)
        else:
            checkpoints.save(model=model, **how)

    run.train_step()  # warms up, and creates the optimizer's states
    first_s = timed(lambda: save(BACKGROUND))  # allocates the host's memory
    background.wait()
    run.reading_s = 0.0
    steps, saves = ({kind: [] for kind in KINDS} for _ in range(2))
    for pair in range((run.steps - 1) // 2):
        position = run.sampler.state_dict()
        for kind in KINDS if pair % 2 else reversed(KINDS):
            run.go_to(position)
            saves[kind].append(timed(lambda kind=kind: save(kind)))
            steps[kind].append(timed(run.train_step))
            background.wait()
    if prepared.folder is not None:
        prepared.folder.release()
    dist.barrier()
    return {"steps": steps, "reading_s": run.reading_s, "saves": saves, "first_background_s": first_s}


def main() -> None:
    given = options_of(__doc__, ranks=2, steps=13)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["ODC_TRITON_CACHE"] = str(folder / "cache")
        options = _prepared_options(folder, given.steps)
        first_s, again_s = _preparing(options), _preparing(options)
        single_thread_environment()  # of the ranks; samples are prepared on all cores, as in training
        of_ranks = launch(measure, options, ranks=given.ranks)
    step_s = {kind: _median(of_ranks, "steps", kind) for kind in KINDS}
    save_s = {kind: _median(of_ranks, "saves", kind) for kind in KINDS}
    first_background_s = max(of["first_background_s"] for of in of_ranks)
    reading = max(of["reading_s"] / sum(map(sum, of["steps"].values())) for of in of_ranks)
    saving = save_s[AT_ONCE] / (STEPS_PER_SAVE * step_s[AT_ONCE])
    rows = [
        ["reading and collating, of a step", f"{reading:.2%}", "≤ 1%"],
        [
            f"a checkpoint at once ({save_s[AT_ONCE]:.3f} s) in {STEPS_PER_SAVE} steps of {step_s[AT_ONCE]:.2f} s",
            f"{saving:.2%}",
            "≤ 2%",
        ],
        [
            f"of it waited for in the background ({save_s[BACKGROUND]:.3f} s; the first {first_background_s:.3f} s)",
            f"{save_s[BACKGROUND] / save_s[AT_ONCE]:.1%}",
            "≤ 10%",
        ],
        ["a step beside the writer, of the same beside none", f"{_beside_the_writer(of_ranks):.1%}", ""],
        [f"{RECORDS} records, prepared", f"{first_s:.2f} s", ""],
        [f"{RECORDS} records, opened again", f"{again_s:.3f} s", "< 2 s"],
    ]
    print(table(rows, ("", "measured", "target")))
    if given.out:
        found = {"step_s": step_s, "save_s": save_s, "first_background_s": first_background_s}
        found |= {"reading_share": reading, "saving_share": saving, "beside_the_writer": _beside_the_writer(of_ranks)}
        found |= {"prepare_s": first_s, "open_s": again_s, "records": RECORDS, "of_ranks": of_ranks}
        save_json(given.out, about() | {"ranks": given.ranks} | found)


def _slowest(of_ranks: list[dict[str, Any]], what: str, kind: str) -> list[float]:
    """The slowest rank's times, in seconds."""
    return [max(times) for times in zip(*(of[what][kind] for of in of_ranks), strict=True)]


def _beside_the_writer(of_ranks: list[dict[str, Any]]) -> float:
    """The median over minibatches of a step's time, of its time without the writer."""
    beside, alone = (_slowest(of_ranks, "steps", kind) for kind in (BACKGROUND, AT_ONCE))
    return statistics.median(one / other for one, other in zip(beside, alone, strict=True))


def _median(of_ranks: list[dict[str, Any]], what: str, kind: str) -> float:
    return statistics.median(_slowest(of_ranks, what, kind))


def _prepared_options(folder: Path, steps: int) -> SftOptions:
    """The demo's text, repeated to RECORDS records, its tokenizer and its model's config."""
    write_text(folder, build_corpus()[0], CONFIG, count=RECORDS)
    return SftOptions(
        data=str(folder / "data.jsonl"),
        init=str(folder / "config.json"),
        tokenizer=str(folder / "tokenizer.json"),
        out=str(folder / "run"),
        steps=steps,
        samples_per_rank=32,
        token_cap=TOKEN_CAP,
        truncate=True,
        checkpoint_every=STEPS_PER_SAVE,
    )


def _preparing(options: SftOptions) -> float:
    from odc_triton.data.dataset import DataOptions
    from odc_triton.data.prepared import prepare_data
    from odc_triton.data.tokenizer import TextEncoder, read_tokenizer

    encoder = TextEncoder.of(read_tokenizer(options.tokenizer))
    start_s = time.perf_counter()
    prepare_data(options.data[0], encoder, DataOptions(max_tokens=options.token_cap, too_long="truncate"))
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
