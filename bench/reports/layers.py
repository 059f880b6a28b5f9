"""What our layers cost on the CPU: a balanced minibatch against plain transformers, and against ODC without them.

    python -m bench.reports.layers [--ranks 2] [--repeats 15] [--out FILE]

Every rank computes the same packs: none waits for another, so the time over plain transformers is overhead. Ratios are
medians over interleaved rounds, with the quartiles of the rounds' ratios.
"""

from __future__ import annotations

import statistics

from odc_triton.base.report import table
from odc_triton.comm.launch import launch

from ..demo import CONFIG, EQUAL_LENGTHS, TOKEN_CAP
from ..harness import Work, balanced, single_thread_environment
from ..provenance import about, options_of, save_json
from ..variants import Odc, OdcLayers, OdcLayersFused, OdcLayersSplit, Unsharded

VARIANTS = (Unsharded, Odc, OdcLayers, OdcLayersFused, OdcLayersSplit)


def main() -> None:
    options = options_of(__doc__, ranks=2, repeats=15)
    single_thread_environment()
    work = Work(dataset="", config=CONFIG, minibatches=[], token_cap=TOKEN_CAP)
    seconds = launch(balanced, VARIANTS, work, EQUAL_LENGTHS, options.repeats, ranks=options.ranks)[0]
    plain = seconds[Unsharded.name]
    rows, ratios = [], {}
    for name, own in seconds.items():
        low, _, high = statistics.quantiles([o / p for o, p in zip(own, plain, strict=True)], n=4)
        ratios[name] = {"ratio": statistics.median(own) / statistics.median(plain), "low": low, "high": high}
        cells = [f"{ratios[name]['ratio']:.3f}", f"{low:.3f} to {high:.3f}"] if own is not plain else ["", ""]
        rows.append([name, f"{statistics.median(own):.3f}", *cells])
    print(table(rows, ("", "s per minibatch", "of unsharded", "quartiles")))
    if options.out:
        given = {"ranks": options.ranks, "config": CONFIG, "lengths": EQUAL_LENGTHS}
        save_json(options.out, about() | given | {"seconds": seconds, "ratios": ratios})


if __name__ == "__main__":
    main()
