"""Records the runs that figures show: `python -m docs.figures.record` writes recorded.json. Nothing here is simulated.

Two ranks train the same minibatches under FSDP2 and under ours; then three ranks train and one of them kills itself.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bench import quiet
from bench.cut import cut
from bench.harness import Work, compare, open_job, single_thread_environment
from bench.provenance import about, append_line, read_lines
from bench.variants import Fsdp2, Odc
from odc_triton import RankLost, fully_shard, minibatch
from odc_triton.comm.memory.heap import Status
from odc_triton.engine.api import engine_of
from odc_triton.jobs.launcher.launch import launch
from odc_triton.jobs.reports.trace import excerpt

RECORDED = Path(__file__).parent / "recorded.json"
SIZES = {"vocab_size": 1024, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
CONFIG = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
TOKEN_CAP = 1024
# Tokens of a minibatch's samples. Each is trained TIMES times; the one that waited least for a core counts.
LENGTHS = {"few": [1000, 400, 360, 340], "many": [1024, 620, 540, 480, 410, 330, 260, 150, 120, 90, 60, 40]}
TIMES = 8
# Rows of each rank's microbatches in the second run, and who kills itself in which minibatch.
ROWS, WIDTH = ([400, 400, 400], [300, 300, 300], [200, 200]), 512
VICTIM, LAST = 1, 4


def trained() -> dict[str, Any]:
    """Of each minibatch of `LENGTHS`: its lengths and what both ranks did under either way, as rows of events."""
    with tempfile.TemporaryDirectory() as folder:
        lengths = [tokens for each in LENGTHS.values() for tokens in each]
        text = np.random.default_rng(0).integers(4, CONFIG["vocab_size"], sum(lengths))
        cut(text, lengths).save(path := os.path.join(folder, "data.npz"))
        few = len(LENGTHS["few"])
        samples = [list(range(few)), list(range(few, len(lengths)))]
        minibatches = [samples[0], *(TIMES * samples)]  # the first warms up
        work = Work(dataset=path, config=CONFIG, minibatches=minibatches, token_cap=TOKEN_CAP)
        results = launch(compare, (Fsdp2, Odc), work, True, 1, ranks=2)[0]
    found = {}
    for first, (name, lengths) in enumerate(LENGTHS.items(), start=1):
        waited = {
            index: max(quiet.share(result.seconds[index], result.waited_s[index]) for result in results)
            for index in range(first, len(minibatches), len(LENGTHS))
        }
        index = min(waited, key=waited.get)
        tracks = excerpt({result.name: result.events for result in results}, minibatches=[index])
        found[name] = {
            "lengths": lengths,
            "balance": {result.name: result.balance for result in results},
            "waited_for_a_core": waited[index],
            "events": {way: [event.as_row() for event in events] for way, events in tracks.items()},
        }
    return {"config": CONFIG, "token_cap": TOKEN_CAP, "minibatches": found}


class Numbered(nn.Module):
    """A model with a parameter that each step raises by one, in all owners' rows: readers see the version they read."""

    def __init__(self, owners: int) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.zeros(owners))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
        )

    def forward(self, rows: torch.Tensor, log: Any) -> torch.Tensor:
        loss = -self.version.sum() * len(rows)
        log("read", [round(each, 3) for each in self.version.tolist()])
        for block in self.blocks:
            rows = rows + block(rows)
        log("read", [round(each, 3) for each in self.version.tolist()])
        return loss + rows.square().mean()


def train_until_killed(path: Path) -> None:
    """Trains on this rank, which logs to `path`: what it did, read and showed, and how it saw that a rank had died."""
    rank, world = open_job()

    def log(what: str, value: Any, at_s: float | None = None) -> None:
        append_line(path, {"s": at_s or time.monotonic(), "rank": rank, "what": what, "value": value})

    def log_events() -> None:
        for event in engine.events.drain():
            seconds = round(event.end_s - event.start_s, 6)
            log(event.kind, [seconds, event.minibatch, event.microbatch, event.label], event.start_s)

    def die(*_: Any) -> None:
        log("killed", "SIGKILL")
        os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    model = fully_shard(Numbered(world))
    log_status(engine := engine_of(model), log)
    others = [p for name, p in model.named_parameters() if name != "version"]
    optimizer = torch.optim.SGD([{"params": others, "lr": 1e-6}, {"params": [model.version], "lr": 1.0}])
    try:
        for number in range(LAST + 1):
            with minibatch(model, tokens=sum(ROWS[rank])) as mb:
                for index, rows in enumerate(ROWS[rank]):
                    if (rank, number, index) == (VICTIM, LAST, 1):
                        model.blocks[1].register_full_backward_pre_hook(die)
                    (model(torch.randn(rows, WIDTH), log) / mb.tokens).backward()
                    log_events()  # now: a rank that is killed logs no more
            optimizer.step()
            optimizer.zero_grad()
    except RankLost as error:
        log("error", f"{type(error).__name__}: {error}")
    log_events()


def log_status(engine: Any, log: Any) -> None:
    """Logs what this rank shows the others from here on, and what it finds when it checks that they live."""
    words = {**vars(engine.barrier), **vars(engine.publication)}
    names = {status.slot: name.strip("_") for name, status in words.items() if isinstance(status, Status)}
    show, is_alive = engine.heap.show, engine.heap.is_alive

    def logged_show(slot: int, value: int) -> None:
        show(slot, value)
        log(names.get(slot, str(slot)), int(value))

    def logged_is_alive(rank: int) -> bool:
        log("alive", [rank, alive := is_alive(rank)])
        return alive

    engine.heap.show, engine.heap.is_alive = logged_show, logged_is_alive


def killed() -> dict[str, Any]:
    """What all ranks logged from the entry of the last minibatch but two on, and the launcher's error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(train_until_killed, path := Path(folder) / "log", ranks=len(ROWS))
        except RuntimeError as error:
            said = str(error)
        lines = sorted((line["s"], line["rank"], line["what"], line["value"]) for line in read_lines(path))
    start_s = next(s for s, _, what, value in lines if (what, value) == ("minibatch", LAST - 2))
    log = [[round(s - start_s, 6), *rest] for s, *rest in lines if s >= start_s]
    return {"victim": VICTIM, "minibatch": LAST, "launcher": said, "log": log}


if __name__ == "__main__":
    single_thread_environment()
    recorded = {"command": "python -m docs.figures.record", **about(), "trained": trained(), "killed": killed()}
    rounded = json.loads(json.dumps(recorded), parse_float=lambda text: round(float(text), 6))
    RECORDED.write_text(json.dumps(rounded) + "\n", encoding="utf-8")
