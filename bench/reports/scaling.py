"""Predictions of docs/scale.md: `python -m bench.reports.scaling --out FILE`, four minutes on one core.

Steps are simulated, on H100s or, where these have too little memory, on H200s, which compute as fast. A way's number is
its efficiency: the seconds of an even share of the work over the step's. Planning is measured, on one core.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from odc_triton.balance.split import assign_split, readable_tokens
from odc_triton.base.files import write_file
from odc_triton.simulate.hardware import DEVICES
from odc_triton.simulate.job import SPLIT, Job, assign_packs
from odc_triton.simulate.models import Model
from odc_triton.simulate.run import simulate
from odc_triton.simulate.study import SETTINGS, draw, make_job, named_lengths, usual_links

from ..provenance import about, options_of

MODELS = {"1.5 B": "qwen2.5-1.5b", "7 B": "qwen2.5-7b", "32 B": "qwen2.5-32b"}
GPUS, HOSTS, SAMPLES = (8, 64, 256, 1024), (8, 4, 2), (1, 2, 4)
MANY = 16  # samples per GPU, for the assignment's time
LENGTHS, CAP, KIND = "longalign", 65_536, DEVICES["h100"]
MEMORY_GB = (KIND.memory_gb, DEVICES["h200"].memory_gb)
FSDP2 = {name.removeprefix("FSDP2").lstrip(" +"): how for name, how in SETTINGS.items() if "FSDP2" in name}


def rows(model: str, gpus: int, samples: int, hosts: Sequence[int] = HOSTS) -> Iterator[dict[str, Any]]:
    """A row for hosts with so many GPUs each. All settings get the same minibatches."""
    found, population = Model.find(MODELS[model]), named_lengths(LENGTHS, 20_000)
    minibatches = draw(population, samples=gpus * samples, minibatches=max(2, min(16, 512 // gpus)))
    how = {"token_cap": CAP, "cost": found.cost, "ranks": gpus}
    balances = {balance for _, balance in FSDP2.values()} | {"mini"}
    whole = {each: [assign_packs(m, balance=each, **how) for m in minibatches] for each in sorted(balances)}

    def run(job: Job, schedule: str, balance: str) -> tuple[float, float]:
        """Seconds of a step, GB per GPU."""
        tokens = readable_tokens(population, samples=gpus * samples, replicas=job.replicas, **how)
        split = {"split_tokens": tokens} if balance == SPLIT else {"assigned": whole[balance]}
        given = {"schedule": schedule, "balance": balance, "token_cap": CAP, **split}
        outcome = simulate(minibatches, job=job, **given)
        return outcome.step_s, (outcome.peak_bytes or 0) / 1e9

    for host in hosts:
        nodes = gpus // host
        job = make_job(found, KIND, usual_links(KIND, host, nodes=nodes))
        copies = {", one copy": replace(job, hybrid=False)} | ({", a copy per host": job} if nodes > 1 else {})
        theirs = {way + kept: run(each, *FSDP2[way]) for kept, each in copies.items() for way in FSDP2}
        way = min(theirs, key=lambda way: (tier(theirs[way][1]), theirs[way][0]))
        ways = {"fsdp2": theirs[way], "odc": run(job, "odc", "mini"), "split": run(job, "odc", SPLIT)}
        if nodes > 1:
            ways["across_not_built"] = run(replace(job, split_across_hosts=True), "odc", SPLIT)
        even_s = sum(job.seconds([length]) for lengths in minibatches for length in lengths) / len(minibatches) / gpus
        tokens = readable_tokens(population, samples=gpus * samples, replicas=nodes, **how)
        planning_s = []
        for lengths in minibatches[:2] * 2:  # the least of four: others may use the machine too
            start_s = time.process_time()
            assign_split(lengths, tokens=tokens, replicas=nodes, **how)
            planning_s.append(time.process_time() - start_s)
        yield {
            "model": model,
            "gpus": gpus,
            "gpus_per_host": host,
            "samples_per_gpu": samples,
            **{name: round(even_s / step_s, 3) for name, (step_s, _) in ways.items()},
            "fsdp2_way": way,
            "gb": {name: round(gb, 1) for name, (_, gb) in ways.items()},
            "step_s": round(ways["split"][0], 2),
            "planning_s": round(min(planning_s), 4),
        }


def tier(gb: float) -> int:
    """0: fits into an H100's memory, 1: into an H200's, 2: into neither."""
    return sum(gb > most for most in MEMORY_GB)


def main() -> None:
    options = options_of(__doc__)
    made = []
    for model in MODELS:
        cells = [(gpus, samples, HOSTS) for gpus in GPUS for samples in SAMPLES]
        for cell in (*cells, (GPUS[-1], MANY, HOSTS[:1])):
            made += rows(model, *cell)
            print(json.dumps(made[-1]), flush=True)
    about_it = {"command": "python -m bench.reports.scaling", **about(), "lengths": LENGTHS, "token_cap": CAP}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in made)
    text = json.dumps(about_it, indent=1).removesuffix("\n}") + f',\n "rows": [\n{lines}\n ]\n}}\n'
    if options.out:
        write_file(options.out, text.encode())


if __name__ == "__main__":
    main()
