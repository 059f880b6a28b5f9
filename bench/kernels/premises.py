"""What the library assumes of a GPU, in a minute: each line decides how something is built.

    python -m bench.kernels.premises FILE [--rehearse]

Appends a line of JSON to FILE for each premise as it is found:

machine         TFLOP/s of torch's product of two square bf16 matrices, GB/s of a copy on the device (reads and writes):
                what cells are relative to
addmm           whether torch adds a product of bf16 into fp32 in place: the best baseline of weight gradients
tree            microseconds, by both clocks, of attention of a prompt of 4,096 tokens and its 8 completions of 512, 32
                heads and 8 of keys, 128 wide, forward and backward: in parts, with the prompt's keys copied for each
                completion, and of 8 whole samples
gather          microseconds of 56 copies of 1 MB by the host's clock, until enqueued, and by the device's: one by one,
                and in one call of cudaMemcpyBatchAsync, without and with its preference for copy engines
flags           microseconds of a round trip between two processes on this GPU: by the kernels of flags, and by stream
                memory operations, which hold no multiprocessor and yield the GPU to the process that is waited for
copy beside     whether a copy on this device proceeds while a kernel holds all threads of all multiprocessors: else a
                kernel that waits for copies must leave some free
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from ctypes import c_uint, c_uint64, c_void_p
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .timing import Machine  # first: it decides where kernels run  # isort: skip

import triton
import triton.language as tl

from odc_kernels.batch_copy import Batch, torchs_batch_copy
from odc_kernels.flags import await_flags, set_flags
from odc_triton.comm.launch import launch
from odc_triton.comm.layout import Region
from odc_triton.comm.local_store import rendezvous_url
from odc_triton.comm.memory import CudaHeap
from odc_triton.hf.document_attention import AttentionTerms, varlen
from odc_triton.sequence.attention import SeenRows, parts_of
from odc_triton.sequence.flash import FlashAttentionOfTree

from ..device import Gpu, Rehearsal
from ..provenance import append_line

SPINS = 20_000_000  # seconds
LOOKS = 1_000_000  # a second: a copy that a kernel makes waits for them all
ROUNDS = 100
PIECES, PIECE_BYTES = 56, 1 << 20  # a layer of Llama-3-8B from 8 owners has as many
_PLACES = [number * PIECE_BYTES for number in range(PIECES)]
PROMPT, COMPLETION, COMPLETIONS = 4096, 512, 8


@triton.jit
def _hold(flag, looks_of, spins):
    looks = 0
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while (seen == 0) & (looks < spins):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        looks += 1
    tl.store(looks_of + tl.program_id(0), looks)


def machine(gpu: Gpu) -> dict[str, Any]:
    found = Machine.measured(gpu, dtype=torch.bfloat16 if gpu.type == "cuda" else torch.float32, peers="loopback")
    return {"tflops": found.flops / 1e12, "copy_gb_s": found.hbm_bytes_s / 1e9}


def addmm(gpu: Gpu) -> dict[str, Any]:
    a, b = torch.randn(64, 32, device=gpu.type).bfloat16(), torch.randn(32, 16, device=gpu.type).bfloat16()
    out = torch.ones(64, 16, device=gpu.type)
    torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    return {"right": torch.allclose(out, 1 + a.float() @ b.float(), rtol=1e-3, atol=1e-3)}


def copy_beside(gpu: Gpu) -> dict[str, Any]:
    """The kernel ends when the copy sets its flag, or after its looks."""
    device = torch.device(gpu.type)
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count  # of 1,024 threads: all there are
    flag, one = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, dtype=torch.int32, device=device)
    looks = torch.zeros(programs, dtype=torch.int32, device=device)
    source = torch.zeros(1 << 26, dtype=torch.int8, device=device)
    target, side = torch.empty_like(source), torch.cuda.Stream(device)
    for spins in (0, LOOKS):  # compiled and loaded first
        flag.zero_()
        torch.cuda.synchronize()
        _hold[(programs,)](flag, looks, spins, num_warps=32)
        with torch.cuda.stream(side):
            target.copy_(source)
            flag.copy_(one)
        torch.cuda.synchronize()
    return {"proceeds": bool((looks < LOOKS).all()), "most_looks": int(looks.max())}


def _ping_pong(rounds: int, by: str) -> float:
    """Microseconds of a round trip between ranks 0 and 1, the median of five series. `by`: kernels, or stream."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", rendezvous_url())
    how = {"rank": rank, "world": 2, "size_bytes": 4096, "token": "premises", "timeout_s": 60.0}
    heap = CudaHeap(**how, group=dist.group.WORLD, shared_device=True)
    region = Region(shape=(2, 32), dtype="int64", itemsize=8, offset_bytes=0)  # a row of flags for each rank
    flags = [heap.shard(region, owner) for owner in range(2)]
    table = torch.tensor([each.data_ptr() for each in flags], device="cuda")
    stop, status = torch.zeros(1, dtype=torch.int32).pin_memory(), torch.zeros(1, dtype=torch.int32, device="cuda")
    driver, stream = ctypes.CDLL("libcuda.so.1"), torch.cuda.Stream()

    def tell(peer: int, value: int) -> None:
        if by == "kernels":
            return set_flags(table=table, ranks=[peer], place=0, value=value)
        return _driver(driver.cuStreamWriteValue64_v2, stream, flags[peer], value)

    def wait(value: int) -> None:
        if by == "kernels":
            given = {"flags": flags[rank], "stop": stop, "status": status, "spins": SPINS}
            return await_flags(ranks=[0], place=0, value=value, number=1, **given)
        return _driver(driver.cuStreamWaitValue64_v2, stream, flags[rank], value)

    series = []
    with torch.cuda.stream(stream):
        for number in range(6):  # the first loads the kernels
            torch.cuda.synchronize()
            dist.barrier()
            start_s = time.perf_counter()
            for value in range(number * rounds + 1, (number + 1) * rounds + 1):
                if rank == 0:
                    tell(1, value)
                wait(value)
                if rank == 1:
                    tell(0, value)
            torch.cuda.synchronize()
            series.append((time.perf_counter() - start_s) / rounds * 1e6)
    vain = int(status)
    dist.barrier()
    dist.destroy_process_group()
    if vain:
        raise RuntimeError("a wait ended without its flag")
    return statistics.median(series[1:])


def _driver(call: Any, stream: torch.cuda.Stream, flag: torch.Tensor, value: int) -> None:
    """cuStreamWriteValue64, or cuStreamWaitValue64 until the flag is at least `value` (CU_STREAM_WAIT_VALUE_GEQ, 0)."""
    if status := call(c_void_p(stream.cuda_stream), c_uint64(flag.data_ptr()), c_uint64(value), c_uint(0)):
        raise RuntimeError(f"the driver refused it with CUresult {status}")


def flags_by_kernels(gpu: Gpu) -> dict[str, Any]:
    return {"round_trip_us": launch(_ping_pong, ROUNDS, "kernels", ranks=2)[0]}


def flags_by_stream(gpu: Gpu) -> dict[str, Any]:
    return {"round_trip_us": launch(_ping_pong, ROUNDS, "stream", ranks=2)[0]}


def gather(gpu: Gpu) -> dict[str, Any]:
    memory = torch.zeros(PIECES * PIECE_BYTES, dtype=torch.int8, device=gpu.type)
    pieces = [(place, torch.zeros(PIECE_BYTES, dtype=torch.int8, device=gpu.type)) for place in _PLACES]
    batch_copy = torchs_batch_copy()
    batches = {"batch": Batch.of(pieces, near=PIECES), "batch_beside_compute": Batch.of(pieces, near=0)}

    def one_by_one() -> None:
        for place, rows in pieces:
            memory[place : place + PIECE_BYTES].copy_(rows, non_blocking=True)

    found: dict[str, Any] = {"one_by_one": both_clocks(gpu, one_by_one)}
    if batch_copy is not None:
        with torch.cuda.stream(torch.cuda.Stream()):  # it takes no default stream
            for name, batch in batches.items():
                found[name] = both_clocks(gpu, partial(batch_copy, batch, memory.data_ptr()))
    return found


def tree(gpu: Gpu) -> dict[str, Any]:
    bounds = [0, *(PROMPT + number * COMPLETION for number in range(COMPLETIONS + 1))]
    parts = parts_of(bounds, [[], *([SeenRows(0, 0, PROMPT)] for _ in range(COMPLETIONS))])
    sample, terms = PROMPT + COMPLETION, AttentionTerms()
    of_rows = torch.tensor(bounds, dtype=torch.int32, device=gpu.type)
    of_samples = torch.arange(0, COMPLETIONS * sample + 1, sample, dtype=torch.int32, device=gpu.type)
    of_copies = torch.cat([of_samples[:1], PROMPT + of_samples])

    def drawn(rows: int) -> list[torch.Tensor]:
        made = [torch.randn(rows, heads, 128, device=gpu.type).bfloat16() for heads in (32, 8, 8)]
        return [each.requires_grad_() for each in made]

    def in_parts(*qkv: torch.Tensor) -> torch.Tensor:
        return FlashAttentionOfTree.apply(*(x.transpose(0, 1)[None] for x in qkv), parts, None, None)

    def with_copies(query: torch.Tensor, *of_keys: torch.Tensor) -> torch.Tensor:
        prompt, *completions = pairwise(bounds)
        rows = [prompt, *(each for completion in completions for each in (prompt, completion))]
        copied = [torch.cat([x[start:end] for start, end in rows]) for x in of_keys]
        return varlen(query, *copied, of_rows, PROMPT, terms, ends_of_keys=of_copies, longest_keys=sample)

    def both_ways(attention: Callable[..., torch.Tensor], qkv: list[torch.Tensor]) -> None:
        out = attention(*qkv)
        torch.autograd.grad(out, qkv, torch.ones_like(out))

    qkv, repeated = drawn(bounds[-1]), drawn(COMPLETIONS * sample)
    found = {way.__name__: both_clocks(gpu, partial(both_ways, way, qkv)) for way in (in_parts, with_copies)}
    whole = partial(varlen, cu_seq_lens=of_samples, longest=sample, terms=terms)
    return found | {"whole_samples": both_clocks(gpu, partial(both_ways, whole, repeated))}


def both_clocks(gpu: Gpu, run: Callable[[], None]) -> dict[str, float]:
    run()
    host, device = [], []
    for _ in range(20):
        gpu.synchronize()
        begin, start_s = gpu.mark(), time.perf_counter()
        run()
        host.append((time.perf_counter() - start_s) * 1e6)
        end = gpu.mark()
        gpu.synchronize()
        device.append(gpu.us_between(begin, end))
    return {"host_us": statistics.median(host), "device_us": statistics.median(device)}


ON_A_GPU: dict[str, Callable[[Gpu], dict[str, Any]]] = {
    "machine": machine,
    "addmm": addmm,
    "tree": tree,
    "gather": gather,
    "flags by kernels": flags_by_kernels,
    "flags by stream": flags_by_stream,
    "copy beside": copy_beside,  # last: what waits in vain for it takes long
}
ON_THE_HOST = ("machine", "gather")


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.kernels.premises", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rehearse", action="store_true", help="by the host, what it can")
    options = parser.parse_args()
    gpu = Rehearsal() if options.rehearse else Gpu()
    failed = False
    for name, find in ON_A_GPU.items():
        if options.rehearse and name not in ON_THE_HOST:
            continue
        try:
            found = find(gpu)
        except Exception as error:  # the others are worth knowing
            found, failed = {"error": f"{type(error).__name__}: {error}"}, True
        append_line(options.file, {"premise": name} | found)
        print(name, found, flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
