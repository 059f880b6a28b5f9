"""What a barrier at every layer alone costs on the demo's minibatches: our transfers with it, and without.

    python -m bench.suites.demo_barrier bench/results/demo_barrier.json

With one sample per rank the longest sample sets the time of a minibatch, with the barrier and without, so the demo's
gain over FSDP2 is of transfers as far as this ratio is 1.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from odc_triton.jobs.launcher.launch import launch

from ..demo import MINIBATCHES, RANKS, WARM_UP, prepare
from ..harness import bootstrap_ratio, compare, disturbed, single_thread_environment
from ..provenance import about, save_json
from ..variants import LayerBarrier, Odc


def main(path: Path) -> None:
    single_thread_environment()
    with tempfile.TemporaryDirectory() as folder:
        results = launch(compare, (LayerBarrier, Odc), prepare(Path(folder)), True, WARM_UP, ranks=RANKS)[0]
    timed = {each.name: each.seconds[WARM_UP:] for each in results}
    ratio = bootstrap_ratio(timed[LayerBarrier.name], timed[Odc.name])
    found = {"barrier": ratio, "seconds": timed, "minibatches": MINIBATCHES, "disturbed": disturbed(results, WARM_UP)}
    save_json(path, found | about())
    print(ratio, found["disturbed"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
