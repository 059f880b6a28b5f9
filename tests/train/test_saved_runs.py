"""Runs that older versions saved go on: what tests/data holds is resumed by today's code.

`python -m tests.train.test_saved_runs FILE.tar.xz` saves such runs; the names of those here say
which version saved them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from odc_triton import fully_shard
from odc_triton.hf import ODCTrainer, enable_packing
from odc_triton.jobs.data.store import contents
from odc_triton.jobs.train.grpo_options import GrpoOptions
from odc_triton.jobs.train.metrics import Metrics, read_metrics
from odc_triton.jobs.train.prepare import identity_of
from odc_triton.jobs.train.run_folder import RunFolder, require_same
from odc_triton.jobs.train.sft_options import SftOptions
from tests.support import jobs, ranks, slow
from tests.support.grpo_case import VOWELS, write_prompts
from tests.support.sft_case import write_case

DATA = Path(__file__).parents[1] / "data"
VERSIONS = ["0.3.0", slow("0.2.0"), slow("0.1.0")]
STEPS, STOP = 4, 2
TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "tie_word_embeddings": True}
OF_ALL = ("sft", "lora")  # each version saved these, 0.3.0 all
RUNS: dict[str, dict[str, Any]] = {
    "sft": {},
    "lora": {"lora_rank": 2},
    "muon": {"optimizer": "muon", "eval_fraction": 0.25, "eval_every": 1},
    "split": {"split_sequences": True, "exact": True, "token_cap": 64},
    "prefixes": {"share_prefixes": True, "replace_layers": True},
    "queue": {"balance": "queue", "gradient_checkpointing": True},
}
# Sums over ranks come in another order, and another torch's kernels round otherwise.
TOLERANCE = 1e-4


def _sft(rank: int, world: int, folder: Path, runs: dict[str, dict[str, Any]]) -> None:
    sizes = {"steps": STEPS, "samples_per_rank": 2, "token_cap": 128, "truncate": True, "lr": 1e-3, "warmup_steps": 2}
    for name, changes in runs.items():
        os.chdir(folder / name)  # the options of a run that goes on are the same: they have relative paths
        wanted = {"data": "data.jsonl", "init": "config.json", "tokenizer": "tokenizer.json", "out": "out"}
        assert jobs.train(rank, world, [SftOptions(**wanted | sizes | changes, keep=10)]) == [jobs.ENDED]


def _grpo(rank: int, world: int, folder: Path, changes: dict[str, Any]) -> None:
    os.chdir(folder)
    wanted = {"data": "prompts.jsonl", "init": "config.json", "tokenizer": "tokenizer.json", "out": "out"}
    wanted |= {"reward": (VOWELS,), "steps": STEPS, "prompts_per_rank": 2, "generations": 3, "kl": 0.1, "keep": 10}
    sizes = {"max_new_tokens": 12, "token_cap": 128, "lr": 1e-2, "warmup_steps": 0, "overlap_rollout": "off"}
    assert jobs.train(rank, world, [GrpoOptions(**wanted | sizes | changes)]) == [jobs.ENDED]


def _trainer(rank: int, world: int, folder: Path, resume: bool) -> list[float]:
    from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # accelerate wants them, and takes our group
    os.chdir(folder)
    torch.manual_seed(9 if resume else 0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("config.json"))
    enable_packing(model)
    model = fully_shard(model)
    samples = [
        {"input_ids": list(range(3, 9 + 5 * index)), "labels": list(range(3, 9 + 5 * index))} for index in range(8)
    ]
    how = {"per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1}
    how |= {"save_strategy": "no" if resume else "steps", "save_steps": STOP, "report_to": "none", "disable_tqdm": True}
    args = TrainingArguments(output_dir="trainer", **how)
    trainer = ODCTrainer(model, args, train_dataset=samples)
    trainer.train(resume_from_checkpoint=resume or None)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def save(archive: Path) -> None:
    """Writes a run of each kind: what it had saved after `STOP` steps, and the losses of all."""
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(archive, "w:xz") as packed:
        for name in RUNS:
            write_case(Path(scratch, name), config=TINY, records=16, characters=60)
        ranks.run(_sft, 2, Path(scratch), {name: run | {"checkpoint_every": STOP} for name, run in RUNS.items()})
        ranks.run(_grpo, 2, write_prompts(Path(scratch, "grpo"), prompts=8, config=TINY), {"checkpoint_every": STOP})
        for out in Path(scratch).glob("*/out"):
            shutil.rmtree(out / "checkpoints" / f"step-{STEPS:08d}")
            for path in out.iterdir():
                if path.name not in ("run.json", "metrics.jsonl", "data", "checkpoints"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        folder = write_case(Path(scratch, "trainer"), config=TINY)
        (losses, _) = ranks.run(_trainer, 2, folder, False)
        (folder / "losses.json").write_text(json.dumps(losses))
        shutil.rmtree(folder / "trainer" / f"checkpoint-{STEPS}")
        packed.add(scratch, ".")


@pytest.fixture(scope="module", params=VERSIONS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(DATA / f"saved-runs-{request.param}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder  # other times and another place than where it was saved: only contents count


def steps_since(saved: Sequence[Metrics], now: Sequence[Metrics]) -> list[int]:
    """Those that were taken again."""
    assert len(saved) == len(now) == STEPS
    return [one["step"] for one, other in zip(saved, now, strict=True) if one["seconds"] != other["seconds"]]


@pytest.mark.parametrize("some", [OF_ALL, slow(("muon", "split", "prefixes", "queue"))])
def test_runs_of_train_sft_go_on(some: tuple[str, ...], saved: Path) -> None:
    names = [name for name in some if name in OF_ALL or (saved / name).is_dir()]
    want = {name: read_metrics(saved / name / "out" / "metrics.jsonl") for name in names}
    ranks.run(_sft, 2, saved, {name: RUNS[name] | {"resume": "auto"} for name in names})
    for name in names:
        got = read_metrics(saved / name / "out" / "metrics.jsonl")
        for number in ("loss", "eval_loss"):
            found, known = ([line[number] for line in lines if number in line] for lines in (got, want[name]))
            torch.testing.assert_close(found, known, rtol=TOLERANCE, atol=0, msg=lambda said, of=name: f"{of}: {said}")
        assert steps_since(want[name], got) == [3, 4]


def test_a_run_of_train_grpo_goes_on(saved: Path) -> None:
    """Its prompts are those that were due; completions may be drawn otherwise."""
    if not (saved / "grpo").is_dir():
        pytest.skip("that version saved none")
    want = read_metrics(metrics := saved / "grpo" / "out" / "metrics.jsonl")
    ranks.run(_grpo, 2, saved / "grpo", {"resume": "auto"})
    got = read_metrics(metrics)
    assert steps_since(want, got) == [3, 4]
    assert [line["kl"] > 0 for line in got] == [line["kl"] > 0 for line in want]


def test_a_checkpoint_of_odc_trainer_goes_on(saved: Path) -> None:
    want = json.loads((saved / "trainer" / "losses.json").read_text())
    for got in ranks.run(_trainer, 2, saved / "trainer", True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=0)


def test_an_option_that_a_saved_run_lacks_had_its_default() -> None:
    wanted = SftOptions(data="hub/name", model="model", out="out").identity(2)
    saved = {name: value for name, value in wanted.items() if name != "eval_fraction"}
    require_same(saved, wanted, where=Path("out"))
    with pytest.raises(ValueError, match=r"--eval-fraction was 0.0 and is 0.5"):
        require_same(saved, wanted | {"eval_fraction": 0.5}, where=Path("out"))


def test_a_saved_run_keeps_its_dtype(saved: Path) -> None:
    """Older versions computed in fp32 by default, on GPUs too: without --dtype such a run goes on so."""
    folder = RunFolder(saved / "sft" / "out")
    folder.lock(resume="auto")
    newest = str(next((saved / "lora" / "out" / "checkpoints").glob("step-*")))
    rows = [("auto", None, folder, "fp32"), ("auto", "bf16", folder, "bf16")]
    rows += [(newest, None, new := RunFolder(saved / "new"), "fp32"), ("never", None, new, "bf16")]
    for resume, given, at, dtype in rows:
        wanted = SftOptions(data="hub/name", model="model", out=str(at.path), resume=resume, dtype=given)
        assert identity_of(wanted, at, 2, "cuda")["dtype"] == dtype
    folder.release()


def test_other_samples_are_another_run(saved: Path) -> None:
    out = saved / "sft" / "out"
    identity = json.loads((out / "run.json").read_text())["identity"]
    same = identity | {"prepared": [contents(min((out / "data").glob("*.npz"), key=os.path.getmtime))]}
    require_same(identity, same, where=out)
    other = next((saved / "lora" / "out" / "data").glob("*.npz"))
    # Another file of the same samples.
    require_same(identity, same | {"prepared": [contents(other)]}, where=out)
    require_same(identity, same | {"data": "moved.jsonl", "tokenizer": "elsewhere"}, where=out)
    with pytest.raises(ValueError, match="the samples differ, so the data, the tokenizer, or the most tokens"):
        require_same(identity, same | {"prepared": ["0" * 32]}, where=out)
    with pytest.raises(ValueError, match=r"tokens of a sample changed: --eval-data was None and is 'held.jsonl'"):
        require_same(identity, same | {"prepared": ["0" * 32], "eval_data": "held.jsonl"}, where=out)


if __name__ == "__main__":
    save(Path(sys.argv[1]).resolve())
