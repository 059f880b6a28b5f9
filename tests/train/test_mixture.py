"""Jobs on several data sets with weights: what a step takes, what is held out. How they train is in test_jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from odc_triton.jobs.train import grpo, sft
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.metrics import read_metrics
from odc_triton.jobs.train.run_folder import require_same
from odc_triton.jobs.train.sft_options import SftOptions
from odc_triton.plan.order import Mix
from odc_triton.sharding.agree import default_mesh
from tests.support import jobs, ranks
from tests.support.deadlines import LONG_S
from tests.support.grpo_case import VOWELS
from tests.support.sft_case import case, write_case

STEPS = 7
WEIGHTS = (0.5, 2.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.jsonl in two: a.jsonl with 10 records, b.json, an array, with 6."""
    folder = write_case(tmp_path_factory.mktemp("mixture"), records=16)
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    (folder / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records[:10]))
    (folder / "b.json").write_text(json.dumps(records[10:]))
    return folder


def options(folder: Path, **changes: object) -> SftOptions:
    """Four samples a step; an epoch has 5 + 12, so 4 steps."""
    both = {"data": (str(folder / "a.jsonl"), str(folder / "b.json")), "data_weight": WEIGHTS}
    return case(folder, **both | {"steps": STEPS} | changes)


def job(rank: int, world: int, wanted: SftOptions, prompts: GrpoOptions) -> tuple[list, ...]:
    """What GRPO's epochs take, what SFT holds out, and the targets of SFT's samples."""
    assert jobs.train(rank, world, [wanted]) == [jobs.ENDED]
    mesh = default_mesh(timedelta(seconds=LONG_S), "cpu", replicas=None)
    for prepare, given in ((grpo.prepare, prompts), (sft.prepare, replace(wanted, out=f"{wanted.out}-held"))):
        with pytest.raises(ValueError, match=r"an epoch has 17 .* one step takes 18"):  # of which the folder is free
            prepare(replace(given, **{given.per_rank: 18}), mesh=mesh)
    prepared = grpo.prepare(prompts, mesh=mesh)
    prepared.folder.release()
    taken = [[prepared.data[i].given for i in prepared.mix.order(epoch, "prompts 0")] for epoch in range(2)]
    held = sft.prepare(replace(wanted, out=f"{wanted.out}-held", eval_fraction=0.25), mesh=mesh)
    held.folder.release()
    whole = sft.prepare(replace(wanted, out=f"{wanted.out}-whole"), mesh=mesh)
    whole.folder.release()
    held_out = [len(held.data), held.mix.sizes, held.mix.taken, len(held.evaluation)]
    return taken, held_out, whole.data.target_counts.tolist()


def test_a_run_takes_what_the_weights_say(folder: Path, tmp_path: Path) -> None:
    wanted = options(folder, out=str(tmp_path / "out"))
    same = {name: getattr(wanted, name) for name in ("data", "data_weight", "init", "tokenizer", "token_cap")}
    prompts = GrpoOptions(**same, reward=(VOWELS,), out=str(tmp_path / "grpo"), max_new_tokens=8)
    ((taken, held, counts),) = ranks.run(job, 1, wanted, prompts)

    mix = Mix((10, 6), WEIGHTS)
    orders = [mix.order(epoch, "0") for epoch in range(2)]
    steps = [orders[step // 4][step % 4 * 4 :][:4] for step in range(STEPS)]
    found = read_metrics(tmp_path / "out" / "metrics.jsonl")
    assert [line["tokens"] for line in found] == np.cumsum([sum(counts[i] for i in step) for step in steps]).tolist()
    assert [line["epoch"] for line in found] == [(step + 1) / 4 for step in range(STEPS)]
    identity = json.loads((tmp_path / "out" / "run.json").read_text())["identity"]
    assert (len(identity["prepared"]), identity["data_weight"]) == (2, [0.5, 2.0])

    a = [json.loads(line)["prompt"] for line in (folder / "a.jsonl").read_text().splitlines()]
    b = [record["prompt"] for record in json.loads((folder / "b.json").read_text())]
    assert sorted(taken[0] + taken[1]) == sorted(a + 4 * b)
    assert len(taken[0]) == len(taken[1]) == 17

    assert held == [8 + 2 * 4, (8, 4), (4, 8), 4], "a quarter of each set: 2 of 10, 2 of 6"


def test_the_identity_of_a_run_with_one_set_is_that_of_saved_runs(folder: Path) -> None:
    one = SftOptions(data="hub/name", model="model", out="out")
    assert one.data == ("hub/name",)
    for same in (one, replace(one, data_weight=(1.0,))):
        assert same.identity(2)["data"] == "hub/name"
        assert "data_weight" not in same.identity(2)
    both = options(folder, data_weight=())
    saved = json.loads(json.dumps(both.identity(2)))
    assert saved["data"] == list(both.data)
    require_same(saved, both.identity(2), where=Path("out"))
    require_same(saved, options(folder, data_weight=(1, 1)).identity(2), where=Path("out"))
    with pytest.raises(ValueError, match=r"data.weight was \[1.0, 1.0\] and is \[0.5, 2.0\]"):
        require_same(saved, options(folder).identity(2), where=Path("out"))
