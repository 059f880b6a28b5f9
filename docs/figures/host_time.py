"""Of docs/performance.md the table: the host's time of a microbatch and of a step, FSDP2's is 1."""

from __future__ import annotations

from .results import markdown, read

WAYS = {
    "plain torch": "plain torch",
    "views": "ODC on the CPU, parameters in shared memory",
    "gathered": "ODC, parameters gathered as on GPUs",
    "replaced layers": "ODC, replaced layers",
}
COLUMNS = ("microbatch", "clip and step")


def data() -> dict:
    return read("host_time.json")


def table(data: dict) -> str:
    rows = []
    for way, words in WAYS.items():
        found = [data["ranks"][ranks][way][column] for column in COLUMNS for ranks in ("1", "2")]
        rows.append([words, *(f"{it['ratio']:.2f} ({it['low']:.2f} to {it['high']:.2f})" for it in found)])
    columns = [f"{column}, {ranks} rank{'s' * (ranks > 1)}" for column in COLUMNS for ranks in (1, 2)]
    about, made = data["about"], "Medians of 40 rounds, all ways in turns in one process; 95% intervals."
    return f"{markdown(('', *columns), rows)}\n{made} {about['hardware']}; commit {about['commit'][:7]}.\n"
