"""What `train sft` spends besides training: reading samples, saving checkpoints, preparing the data.

    python -m bench.reports.sft_costs [--ranks 2] [--steps 12] [--out FILE]

The demo's model, data and minibatches. Steps come in rounds of three: after the first a checkpoint is saved at once,
after the second in the background, after the third none. A save is what the loop waits for it; what its thread costs is
the next step's time over that of a step after none. Saving is given as its share of a run that saves once in 100 steps;
the data are 10,000 records, prepared once into an empty folder and then found again.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.demo import CONFIG, TOKEN_CAP
from bench.harness import single_thread_environment
from bench.provenance import about, options_of, save_json
from bench.stdlib_corpus import build_corpus, write_text
from odc_triton.base.report import table
from odc_triton.comm.launch import launch
from odc_triton.train.sft_options import SftOptions

RECORDS = 10_000
STEPS_PER_SAVE = 100


def measure(options: SftOptions) -> dict[str, Any]:
    """On one rank: seconds of each step, of reading its samples, of each checkpoint. Collective."""
    import torch.distributed as dist

    from odc_triton.checkpoint.background import BackgroundCheckpoints
    from odc_triton.checkpoint.steps import Checkpoints
    from odc_triton.sharding.agree import default_mesh
    from odc_triton.sharding.shard import fully_shard
    from odc_triton.train.prepare import build_model, precision, prepare
    from odc_triton.train.run import SftRun

    class Timed(SftRun):
        reading_s: float = 0.0

        def next_packs(self) -> Any:
            start_s = time.perf_counter()
            packs = super().next_packs()
            self.reading_s += time.perf_counter() - start_s
            return packs

    mesh = default_mesh(timedelta(minutes=30))
    prepared = prepare(options, mesh=mesh)
    model, cost = build_model(options, prepared, rank=mesh.get_rank())
    model = fully_shard(model, mesh=mesh, mp_policy=precision(options.dtype))
    run = Timed(options=options, model=model, data=prepared.data, cost=cost, identity=prepared.identity)
    checkpoints = Checkpoints(Path(options.out) / "checkpoints", keep=options.keep)
    run.train_step()  # warms up, and creates the optimizer's states
    run.reading_s, steps, saves = 0.0, [], []
    for _ in range(run.steps - 1):
        dist.barrier()
        start_s = time.perf_counter()
        run.train_step()
        steps.append(time.perf_counter() - start_s)
    for _ in range(SAVES):
        dist.barrier()
        start_s = time.perf_counter()
        checkpoints.save(model=run.model, optimizer=run.optimizer, state=run.position(), step=run.state.step)
        saves.append(time.perf_counter() - start_s)
    if prepared.folder is not None:
        prepared.folder.release()
    dist.barrier()
    return {"steps": steps, "reading_s": run.reading_s, "saves": saves}


def main() -> None:
    given = options_of(__doc__, ranks=2, steps=12)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["ODC_TRITON_CACHE"] = str(folder / "cache")
        options = _prepared_options(folder, given.steps)
        first_s, again_s = _preparing(options), _preparing(options)
        single_thread_environment()  # of the ranks; samples are prepared on all cores, as in training
        of_ranks = launch(measure, options, ranks=given.ranks)
    step_s = statistics.median(max(times) for times in zip(*(of["steps"] for of in of_ranks), strict=True))
    save_s = statistics.median(max(times) for times in zip(*(of["saves"] for of in of_ranks), strict=True))
    reading = max(of["reading_s"] / sum(of["steps"]) for of in of_ranks)
    saving = save_s / (STEPS_PER_SAVE * step_s)
    rows = [
        ["reading and collating, of a step", f"{reading:.2%}", "≤ 1%"],
        [f"a checkpoint ({save_s:.2f} s) in {STEPS_PER_SAVE} steps of {step_s:.2f} s", f"{saving:.2%}", "≤ 2%"],
        [f"{RECORDS} records, prepared", f"{first_s:.2f} s", ""],
        [f"{RECORDS} records, opened again", f"{again_s:.3f} s", "< 2 s"],
    ]
    print(table(rows, ("", "measured", "target")))
    if given.out:
        found = {"step_s": step_s, "save_s": save_s, "reading_share": reading, "saving_share": saving}
        found |= {"prepare_s": first_s, "open_s": again_s, "records": RECORDS, "of_ranks": of_ranks}
        save_json(given.out, about() | {"ranks": given.ranks} | found)


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
    prepare_data(options.data, encoder, DataOptions(max_tokens=options.token_cap, too_long="truncate"))
    return time.perf_counter() - start_s


if __name__ == "__main__":
    main()
