"""Random faults, by seed: `python -m tests.faults.campaign --trials 20 --seed 0` prints what each did."""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from odc_triton.train.metrics import read_metrics
from odc_triton.train.sft_options import SftOptions
from tests.faults.inject import PHASES, Fault, run_with
from tests.faults.trial import Result, run_trial
from tests.support import ranks
from tests.support.sft_case import case, write_case

STEPS = 5


def random_fault(random_numbers: random.Random, world: int) -> Fault:
    """Any rank, phase and moment; one in five stops the rank instead of killing it."""
    phase = random_numbers.choice(PHASES)
    return Fault(
        rank=0 if phase in ("metrics", "export") else random_numbers.randrange(world),
        phase=phase,
        minibatch=random_numbers.randrange(STEPS),
        moment=random_numbers.randrange({"step": 1, "after step": 1, "metrics": 2, "export": 6}.get(phase, 12)),
        signal=signal.SIGSTOP if random_numbers.random() < 0.2 else signal.SIGKILL,
    )


def baseline(folder: Path) -> tuple[SftOptions, list[float]]:
    """Options of the campaign's run, and its losses without a fault."""
    write_case(folder / "case")
    how = {"steps": STEPS, "samples_per_rank": 6, "checkpoint_every": 2, "checkpoint_background": True}
    wanted = case(folder / "case", out=str(folder / "whole"), **how)
    (folder / "tmp").mkdir()
    ranks.run(run_with, 1, wanted, None, str(folder / "tmp"))
    return wanted, [line["loss"] for line in read_metrics(folder / "whole" / "metrics.jsonl")]


def run(trials: int, seed: int, folder: Path) -> list[Result]:
    """The results of all trials, each printed as it ends. A broken promise raises an AssertionError that names it."""
    random_numbers = random.Random(seed)
    wanted, losses = baseline(folder)
    results = []
    for trial in range(trials):
        world = random_numbers.choice((2, 3))
        fault = random_fault(random_numbers, world)
        told = random_numbers.random() < 0.5 and fault.signal == signal.SIGKILL
        start_s = time.monotonic()
        try:
            result = run_trial(
                replace(wanted, samples_per_rank=6 // world),
                fault,
                world=world,
                told=told,
                folder=folder / f"trial-{trial}",
                losses=losses,
            )
        except AssertionError as error:
            raise AssertionError(
                f"trial {trial} of seed {seed}, world {world}, told {told}, {fault}: {error}"
            ) from error
        results.append(result)
        seconds = f"{time.monotonic() - start_s:.0f} s, {result.ended_s:.1f} s after the fault"
        print(f"trial {trial} of {world} ranks: {fault} in {seconds}; {result}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = run(options.trials, options.seed, Path(folder))
    print(f"{sum(result.struck for result in results)} of {len(results)} struck; all promises kept")


if __name__ == "__main__":
    main()
