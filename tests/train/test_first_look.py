"""What is said before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from odc_triton.jobs.train.sft_options import SftOptions
from tests.support.sft_case import write_case

_CODE = """
import sys
from odc_triton.tools.cli.command import main
status = main(["train", "sft", *sys.argv[1:]])
print(status, "torch" in sys.modules)
"""


def test_a_refused_command_and_an_ended_run_are_known_at_once(tmp_path: Path) -> None:
    folder = write_case(tmp_path)
    given = {"data": str(folder / "data.jsonl"), "init": str(folder / "config.json"), "tokenizer": "t", "dtype": "fp32"}
    (out := folder / "ended").mkdir()
    identity = SftOptions(**given, out=str(out)).identity(1)
    record = {"identity": identity, "ended": {"step": 7, "length": [None, None]}}
    (out / "run.json").write_text(json.dumps(record) + "\n")
    (out / "metrics.jsonl").write_text('{"step": 7, "tokens": 1}\n')
    (out / "model").mkdir()
    (out / "model" / "config.json").touch()
    (folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "t").mkdir()
    cases = (
        ({"init": None, "tokenizer": None, "model": "./nowhere"}, 1, "./nowhere: there is no such file or folder"),
        ({"init": "nowhere/config.json"}, 1, "nowhere/config.json: there is no such file or folder"),
        ({"data": "bad.jsonl"}, 1, "bad.jsonl, line 2: not valid JSON"),
        ({"out": "ended", "resume": "auto", "seed": "1"}, 1, "the run in ended had other options (--seed was 0"),
        ({"out": "ended", "resume": "auto"}, 0, "the run in ended has ended after step 7: ended/model has its weights"),
    )
    for changes, status, said in cases:
        options = {name: value for name, value in ({"out": "out", "ranks": "1"} | given | changes).items() if value}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [sys.executable, "-c", _CODE, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
        assert said in done.stdout + done.stderr, (changes, done)
        assert done.stdout.splitlines()[-1] == f"{status} False", (changes, done)
