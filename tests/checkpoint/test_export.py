"""`odc-triton export`: a checkpoint of a run as a folder of plain transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from odc_triton import full_parameters
from odc_triton.checkpoint.folder import Manifest
from odc_triton.jobs.checkpoints.steps import Checkpoints
from odc_triton.jobs.data.tokenizer import train_tokenizer
from odc_triton.tools.cli import export
from odc_triton.tools.cli.command import main
from tests.support import ranks
from tests.support.checkpointed import make, train
from tests.support.models import build

IDS = torch.arange(3, 12)[None]


def _run(rank: int, world: int, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = make("gpt2-tied", bf16=False)
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        train(model, optimizer, "gpt2-tied", range(step))
        checkpoints.save(model=model, optimizer=optimizer, state={"identity": {"dtype": "bf16"}}, step=step)
    return dict(full_parameters(model))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run's checkpoints, and the weights in the newest."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks.run(_run, 2, folder)[0]


def test_export(tmp_path: Path, saved: tuple[Path, dict], capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = saved[1]
    shutil.copytree(saved[0], tmp_path / "run")
    plain = build("gpt2-tied").eval()
    plain.config.save_pretrained(tmp_path / "config")
    settings = json.loads((tmp_path / "config" / "config.json").read_text())
    (tmp_path / "config" / "config.json").write_text(json.dumps(settings | {"eos_token_id": None}))
    train_tokenizer(["some words, some more words"] * 9, vocab_size=300).save(str(tmp_path / "tokenizer.json"))
    config, tokenizer = str(tmp_path / "config" / "config.json"), str(tmp_path / "tokenizer.json")
    for dtype in ("fp32", "bf16", None):  # None: by default the run's
        out = tmp_path / str(dtype)
        command = ["export", str(tmp_path / "run"), "--init", config, "--tokenizer", tokenizer]
        assert main([*command, "--out", str(out), *(["--dtype", dtype] if dtype else [])]) == 0
        assert f"{out} has the model of {tmp_path / 'run' / 'step-00000002'}\n" in capsys.readouterr().out
        torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        got = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
        assert got.dtype == torch_dtype
        named = dict(got.named_parameters())
        torch.testing.assert_close(named, {name: weights[name].to(torch_dtype) for name in named}, rtol=0, atol=0)
        with torch.no_grad():
            plain.load_state_dict(weights, strict=False)
            want = plain.to(torch_dtype)(input_ids=IDS, use_cache=False).logits
            assert torch.equal(got(input_ids=IDS, use_cache=False).logits, want)
        assert json.loads((out / "generation_config.json").read_text())["bos_token_id"] == 1
        assert got.generation_config.eos_token_id == AutoTokenizer.from_pretrained(out).eos_token_id == 0
        assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode
    (tmp_path / "whole").mkdir()
    (tmp_path / "run").rename(tmp_path / "whole" / "checkpoints")
    command[1] = str(tmp_path / "whole")  # as `train sft` leaves it
    assert main(["export", command[1], "--out", str(tmp_path / "again")]) == 1
    assert "give either --model or --init (a config.json): there is no" in capsys.readouterr().err
    (tmp_path / "whole" / "run.yaml").write_text("init: c/config.json\ntokenizer: [3]\n")
    assert main(["export", command[1], "--out", str(tmp_path / "again")]) == 1
    assert "c/config.json: there is no such file or folder; " in (said := capsys.readouterr().err)
    assert "run.yaml names it: run this where the run was started, or give --model or --init" in said
    assert main([*command, "--out", str(tmp_path / "again")]) == 0
    assert "has the model of " + str(tmp_path / "whole" / "checkpoints" / "step-00000002") in capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "fp32")]) == 1
    assert "is not empty" in capsys.readouterr().err
    inside = tmp_path / "whole" / "checkpoints" / "step-00000002" / "hf"
    assert main([*command, "--out", str(inside)]) == 1
    assert f"--out is {inside}, inside of the checkpoint" in capsys.readouterr().err
    assert not inside.exists()
    assert main([*command, "--out", str(tmp_path / "merged"), "--merge"]) == 1
    assert "is not of a run with --lora-rank, so it has no adapters: leave it out" in capsys.readouterr().err


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("gpt2-tied").config.save_pretrained(tmp_path)
    assert main(["export", str(tmp_path), "--init", str(tmp_path / "config.json"), "--out", str(tmp_path / "o")]) == 1
    assert (
        "is neither a checkpoint (step-…), nor a folder of them, nor a run's folder with any" in capsys.readouterr().err
    )
    for name in ("model", "adapter"):  # as a run that saves no checkpoints leaves it
        (tmp_path / "run" / name).mkdir(parents=True)
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "o")]) == 1
        assert f"with any; its model is in {tmp_path / 'run' / name}\n" in capsys.readouterr().err
        (tmp_path / "run" / name).rmdir()
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), "--model", "a", "--init", "b", "--out", str(tmp_path / "o")])
    assert "give either --model or --init" in capsys.readouterr().err


@pytest.mark.parametrize("call", [1, 2], ids=["while it is found", "while it is read"])
def test_a_run_removes_it_meanwhile(
    tmp_path: Path, saved: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """As with --keep 1: the next one, which was there before, is exported."""
    from transformers import AutoModelForCausalLM

    run, calls, check = shutil.copytree(saved[0], tmp_path / "run"), [], Manifest.check_sizes
    older, newest, next_one = (run / f"step-{step:08d}" for step in (1, 2, 3))
    build("gpt2-tied").config.save_pretrained(tmp_path / "config")

    def removes(manifest: Manifest, folder: Path) -> None:
        calls.append(folder)
        if len(calls) == call:
            assert folder == newest
            shutil.copytree(newest, next_one)
            shutil.rmtree(older)
            shutil.rmtree(newest)
        check(manifest, folder)

    monkeypatch.setattr(Manifest, "check_sizes", removes)
    command = ["export", str(run), "--init", str(tmp_path / "config" / "config.json"), "--dtype", "fp32", "--out"]
    assert main([*command, str(tmp_path / "out")]) == 0
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters():
        assert torch.equal(value, saved[1][name])
    (next_one / "random-0.json").unlink()  # damaged and there: no other is taken
    assert main([*command, str(tmp_path / "other")]) == 1


def test_the_best_one_may_be_replaced_meanwhile(
    tmp_path: Path, saved: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, gone = shutil.copytree(saved[0], tmp_path / "run"), [tmp_path / "run" / "step-00000000"]
    monkeypatch.setattr(export, "_best_or", lambda newest: gone.pop() if gone else newest)
    build("gpt2-tied").config.save_pretrained(tmp_path / "config")
    command = ["export", str(run), "--init", str(tmp_path / "config" / "config.json"), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert f"the run has removed {run / 'step-00000000'} meanwhile" in (said := capsys.readouterr().out)
    assert f"has the model of {run / 'step-00000002'}\n" in said


@pytest.mark.parametrize(("best", "step"), [(3, 3), (4, 5), (0, 5)], ids=["there", "gone", "none yet"])
def test_which_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: int, step: int) -> None:
    """Before the first evaluation none is, also not that of step 0, of a run stopped in its first rollout."""
    for each in (0, 3, 5):
        (tmp_path / f"step-{each:08d}").mkdir()
    state = {"identity": {"keep_best": True}, "state": {"best_step": best}}
    monkeypatch.setattr("odc_triton.checkpoint.folder.read_state", lambda _: state)
    assert export._best_or(tmp_path / "step-00000005").name == f"step-{step:08d}"


def _killed(rank: int, world: int, moment: str, command: list[str]) -> None:
    """Exports, and dies once weights are written, or before or after the folder gets its name."""
    import safetensors.torch

    module, name = (safetensors.torch, "save_file") if moment == "written" else (os, "rename")
    former = getattr(module, name)

    def dies(*arguments: object, **options: object) -> None:
        is_it = moment == "written" or str(arguments[1]) == command[-1]
        if moment != "renaming" or not is_it:
            former(*arguments, **options)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(module, name, dies)
    main(command)


def test_a_killed_export(tmp_path: Path, saved: tuple[Path, dict]) -> None:
    """The folder is whole or not there, and the next export of the same name leaves nothing beside it."""
    from transformers import AutoModelForCausalLM

    run, weights = saved
    build("gpt2-tied").config.save_pretrained(tmp_path / "config")
    (tmp_path / "outs").mkdir()
    out = tmp_path / "outs" / "out"
    command = ["export", str(run), "--init", str(tmp_path / "config" / "config.json"), "--dtype", "fp32"]
    command += ["--out", str(out)]

    def is_right() -> bool:
        got = AutoModelForCausalLM.from_pretrained(out)
        return all(torch.equal(value, weights[name]) for name, value in got.named_parameters())

    for moment in ("written", "renaming", "renamed"):
        with ranks.start(_killed, 1, moment, command) as job:
            assert job.join()[0].signal == signal.SIGKILL, moment
        left = sorted(os.listdir(out.parent))
        assert [name.rpartition(".")[2] for name in left] == (["out"] if moment == "renamed" else ["new"]), moment
    assert is_right()
    assert main(command) == 1  # it stays
    out.rename(tmp_path / "away")
    (out.parent / ".out.1.00000000.new").mkdir()
    assert main(command) == 0
    assert is_right()
    assert os.listdir(out.parent) == ["out"]
