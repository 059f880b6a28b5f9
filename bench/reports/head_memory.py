"""The fused head against the plain one on the CPU: peak memory and time of loss and gradients.

    python -m bench.reports.head_memory [--tokens 2048] [--vocabulary 32768] [--columns 1024] [--rounds 7]

Peak memory is what torch allocates during one call beyond what was allocated before. Times are medians of interleaved
calls in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from odc_triton.base.report import table
from odc_triton.nn import LMHead

from ..provenance import about, options_of, save_json


def peak_bytes(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        run()
    changes = [event.nbytes() for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(torch.tensor(changes).cumsum(0).max())


def main() -> None:
    options = options_of(__doc__, tokens=2048, vocabulary=32768, columns=1024, rounds=7)
    torch.set_num_threads(1)
    h = torch.randn(options.tokens, options.columns, requires_grad=True)
    targets = torch.randint(0, options.vocabulary, (options.tokens,))
    head = LMHead(options.columns, options.vocabulary)
    variants = {
        "plain": lambda: F.cross_entropy(F.linear(h, head.weight), targets),
        "fused": lambda: F.cross_entropy(head(h), targets),
    }
    losses, gradients, peaks = {}, {}, {}
    for name, loss in variants.items():
        h.grad = head.weight.grad = None
        peaks[name] = peak_bytes(lambda loss=loss: loss().backward())
        losses[name], gradients[name] = loss().item(), (h.grad.clone(), head.weight.grad.clone())
    for of_plain, of_fused in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(of_fused, of_plain, rtol=1e-4, atol=1e-4 * of_plain.abs().max().item())
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, loss in variants.items():
            h.grad = head.weight.grad = None
            begin_s = time.perf_counter()
            loss().backward()
            seconds[name].append(time.perf_counter() - begin_s)
    ratios = sorted(f / p for p, f in zip(seconds["plain"], seconds["fused"], strict=True))
    logits_mb = 4 * options.tokens * options.vocabulary / 1e6
    rows = [[name, losses[name], peaks[name] / 1e6, sorted(seconds[name])[options.rounds // 2]] for name in variants]
    print(f"{options.tokens} tokens, {options.vocabulary} words, fp32: the logits are {logits_mb:.0f} MB")
    print(table(rows, ("head", "loss", "peak MB", "seconds")))
    print(
        f"fused: {peaks['fused'] / peaks['plain']:.2f} of the memory, "
        f"{ratios[options.rounds // 2]:.2f} of the time ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    )
    if options.out:
        sizes = {"tokens": options.tokens, "vocabulary": options.vocabulary, "columns": options.columns}
        found = {"peak_bytes": peaks, "seconds": seconds, "time_ratios": ratios}
        save_json(options.out, about() | sizes | found)


if __name__ == "__main__":
    main()
