"""Reading a policy while it trains: whole reads beside publications, a step beside readers.

    python -m bench.suites.policy [--reads 100000] [--turns 15] [--out FILE]

Ranks train on CPUs, and one process outside of the job reads. Keys of the result:

reads   The process reads without pause while two ranks step. Rank 0 keeps a checksum of every version; a read whose
        checksum is not its version's is mixed. `unchecked`: the same without the second look at the owners' numbers.
step    Seconds of a step of one rank on one core, in turns, by what the process does on another core: nothing; one
        read per step, as a sampler's; reads without pause; copies of as many bytes of its own memory, without pause.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from odc_triton import fully_shard, minibatch, offer_policy, read_policy
from odc_triton.base.report import table
from odc_triton.checkpoint.pretrained_tensors import PretrainedTensors
from odc_triton.comm.launch import launch
from odc_triton.policy.reader import PolicyReader

from .. import quiet
from ..harness import in_turn, median_ratio, open_job, single_thread_environment
from ..provenance import about, options_of, save_parts

PROCESSES: Any = multiprocessing.get_context("spawn")
RANKS = 2
READS, UNCHECKED_READS, TURNS = 100_000, 5_000, 15
PUBLICATIONS, MET = 2_000, 1_000  # at least so many beside all reads
STEPS = 8  # in a turn
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32_000}
BESIDE = NOBODY, ONE_READ, READS_ON, COPIES = "nobody", "one read per step", "reads", "copies"

Tensors = Iterable[tuple[str, torch.Tensor]]


class _Run:
    """Of one rank: a model that trains on random tokens. On rank 0: the process outside, and a pipe to it."""

    def __init__(self, sizes: dict[str, int], tokens: int, outside: Any, *args: Any) -> None:
        """`outside`: a function of (the pipe, the policy's address, *args)."""
        from transformers import Qwen2Config, Qwen2ForCausalLM

        self.rank, self.world = open_job()
        torch.manual_seed(0)
        config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
        self.model: Any = fully_shard(Qwen2ForCausalLM(config))
        self.megabytes = sum(each.numel() for each in self.model.parameters()) * 4 / 1e6
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._tokens, self._offer = tokens, offer_policy(self.model)
        if self.rank == 0:
            self.pipe, theirs = PROCESSES.Pipe()
            args = theirs, self._offer.address, *args
            self._outside = PROCESSES.Process(target=outside, args=args, daemon=True)
            self._outside.start()
            theirs.close()

    def step(self) -> None:
        ids = torch.randint(0, self.model.config.vocab_size, (1, self._tokens))
        with minibatch(self.model):
            self.model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()

    def wait(self, message: Any = None) -> Any:
        """Waits for all ranks; returns rank 0's message."""
        return self.model._odc_engine.exchange("go on", {"message": message})[0]["message"]

    def end(self) -> None:
        if self.rank == 0:
            self._outside.join()
        self.wait()
        self._offer.close()


def checksum(tensors: Tensors) -> int:
    found = 0
    for _, value in tensors:
        found = zlib.crc32(value.numpy(), found)
    return found


def _compared(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """By way, beside the first one."""
    first = next(iter(seconds.values()))
    return {
        way: {"median_s": statistics.median(each), "ratio": median_ratio(each, first), "seconds": each}
        for way, each in seconds.items()
    }


def _print_turn(part: str, turn: int, seconds: dict[str, list[float]]) -> None:
    print(f"  {part} {turn}: " + ", ".join(f"{way} {each[-1]:.3f} s" for way, each in seconds.items()), flush=True)


# ---------------------------------------------------------------------- whole reads beside publications


class UncheckedReader(PolicyReader):
    """Without the second look at the owners' numbers."""

    def _is_still(self, number: int) -> bool:
        return True


def _reads(pipe: Any, address: str, kind: type[PolicyReader], reads: int, publications: int, met: int) -> None:
    """Reads until there are so many of each; sends how often it found (version, checksum), and how many reads a
    publication met.
    """
    torch.set_num_threads(1)
    reader, found, calls, again, first = kind(address), Counter(), 0, 0, None

    def take(tensors: Tensors) -> int:
        nonlocal calls
        calls += 1
        return checksum(tensors)

    while first is None or found.total() < reads or again < met or reader.version - first < publications:
        before = calls
        value = reader.read(take)
        found[reader.version, value] += 1
        again += calls > before + 1
        first = reader.version if first is None else first
        if found.total() % 10_000 == 0:
            print(f"  reads {found.total()}: {reader.version - first} publications, {again} reads met one", flush=True)
    pipe.send((found, again))


def read_beside(kind: type[PolicyReader], reads: int, publications: int, met: int) -> dict[str, Any] | None:
    """Part `reads`, on each rank; the result on rank 0."""
    run, versions, found = _Run(TINY, 8, _reads, kind, reads, publications, met), {}, None
    start_s = time.monotonic()
    while True:
        if run.rank == 0:
            versions[run.model._odc_engine.publication.number] = checksum(PretrainedTensors(run.model))
            found = run.pipe.recv() if run.pipe.poll() else None
        if run.wait(found is not None):
            break
        run.step()
    run.end()
    if found is None:
        return None
    counts, again = found
    return {
        "reads": counts.total(),
        "publications": max(counts)[0] - min(counts)[0],
        "met_a_publication": again,
        "mixed": sum(count for (version, value), count in counts.items() if versions[version] != value),
        "seconds": time.monotonic() - start_s,
    }


# ---------------------------------------------------------------------- a step beside readers


def _beside(pipe: Any, address: str, core: int) -> None:
    """Does what it was told; told NOBODY, sends how often."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    reader, done = read_policy(address), 0
    own = dict(reader)
    one, other = torch.ones(2, sum(value.numel() for value in own.values()))
    pipe.send("ready")
    while (way := pipe.recv()) is not None:
        if way == NOBODY:
            pipe.send(done)
            done = 0
        while way != NOBODY:
            if way == COPIES:
                other.copy_(one)
            else:
                reader.read(lambda tensors: [own[name].copy_(value) for name, value in tensors])
            done += 1
            if way == ONE_READ or pipe.poll():
                break


def step_beside(turns: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Part `step`, of the only rank. The first turn is not counted."""
    cores = sorted(os.sched_getaffinity(0))
    run = _Run(sizes, 64, _beside, cores[-1])
    os.sched_setaffinity(0, {cores[0]})
    run.pipe.recv()
    seconds: dict[str, list[float]] = {way: [] for way in BESIDE}
    done, disturbed = Counter(), 0
    for turn in range(turns + 1):
        for way in in_turn(BESIDE, turn):
            took, waited_s = [], quiet.waited_s()
            for step in range(STEPS):
                if way == ONE_READ or (step == 0 and way != NOBODY):
                    run.pipe.send(way)
                start_s = time.monotonic()
                run.step()
                took.append(time.monotonic() - start_s)
            disturbed += turn > 0 and quiet.is_disturbed(sum(took), [quiet.waited_s() - waited_s])
            run.pipe.send(NOBODY)
            done[way] += run.pipe.recv()
            seconds[way].append(statistics.median(took))
        _print_turn("step", turn, seconds)
    run.pipe.send(None)
    run.end()
    ways = _compared({way: each[1:] for way, each in seconds.items()})
    for way, each in ways.items():
        each["done_per_step"] = done[way] / (STEPS * (turns + 1))
    return {"ways": ways, "steps_of_a_turn": STEPS, "disturbed": disturbed, "megabytes": run.megabytes}


# ---------------------------------------------------------------------- the command


def _rows(part: dict[str, Any]) -> list[list[object]]:
    rows = []
    for way, each in part["ways"].items():
        median_s, ratio, _, *others = each.values()
        rows.append([way, median_s, f"{ratio['ratio']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})", *others])
    return rows


def main() -> int:
    options = options_of(__doc__, reads=READS, turns=TURNS)
    single_thread_environment()
    start_s = time.monotonic()
    reads = launch(read_beside, PolicyReader, options.reads, PUBLICATIONS, MET, ranks=RANKS)[0]
    unchecked = launch(read_beside, UncheckedReader, UNCHECKED_READS, 0, 0, ranks=RANKS)[0]
    step = launch(step_beside, options.turns, LARGE, ranks=1)[0]
    took_s = time.monotonic() - start_s
    if options.out is not None:
        command = f"python -m bench.suites.policy --reads {options.reads} --turns {options.turns}"
        parts = {"reads": reads, "unchecked": unchecked, "step": step}
        save_parts(options.out, **parts, about={"command": command, "took_s": took_s, **about()})
    rows = [["checked", *reads.values()], ["unchecked", *unchecked.values()]]
    print(table(rows, ("", "reads", "publications", "met a publication", "mixed", "seconds")))
    print(table(_rows(step), ("beside a step", "its seconds", "over nobody", "reads or copies per step")))
    print(f"disturbed: {step['disturbed']} of {options.turns * len(BESIDE)} turns")
    print(f"{step['megabytes']:.0f} MB of weights; {took_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
