"""What a measurement decides, the table it leaves, who reads that, and a real run of the command."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from odc_kernels.tiles import LinearTile, WgradTile
from odc_triton import fully_shard, minibatch
from odc_triton.base.errors import RanksDiffer
from odc_triton.engine.api import engine_of
from odc_triton.machine.topology import Place
from odc_triton.nn.choice import TABLE, Entry, as_choice, choose
from odc_triton.nn.replace import replace_layers
from odc_triton.nn.tuned import Line, load
from odc_triton.plan.decoder import Decoder
from odc_triton.recurrent.layers import recurrent_layers
from odc_triton.tools.cli.command import main
from odc_triton.tools.tune import TuneOptions, _tune, run_tune, save
from odc_triton.tools.tune.attention import RULES, measure_rule
from odc_triton.tools.tune.candidates import decide, ways
from odc_triton.tools.tune.trial import Measured
from odc_triton.tools.tune.workload import Workload, workloads_of
from tests.balance.test_decoder import config_of
from tests.cli.test_profile import CONFIG, launch_among_tests
from tests.support import ranks, slow
from tests.support.families import causal_lm
from tests.support.versions import since

HERE = Place(backend="cpu", processor="A processor", topology="cpu", ranks=2)
PLAIN, FUSED, DIRECT = "eager/gathered/whole", "eager/gathered/fused", "triton/direct/fused"


def test_only_what_is_clearly_faster_displaces_the_shipped_way() -> None:
    shipped = {8: PLAIN}
    assert decide({8: {PLAIN: [1.0] * 4, FUSED: [0.9] * 4}}, shipped) == {8: FUSED}
    assert decide({8: {PLAIN: [1.0] * 4, FUSED: [0.98] * 4}}, shipped) == {8: PLAIN}  # within the margin
    noisy = {PLAIN: [1.0, 1.0, 1.0, 1.0, 1.0], FUSED: [0.5, 0.5, 0.5, 1.1, 1.1]}  # faster in the median, not clearly
    assert decide({8: noisy}, shipped) == {8: PLAIN}
    assert decide({8: {DIRECT: [9.5], FUSED: [9.0]}}, shipped) == {8: FUSED}  # the shipped way did not run
    with pytest.raises(ValueError, match="no way to run it with 8 tokens"):
        decide({8: {}}, shipped)


def test_an_operator_of_one_backend_has_the_same_for_all_tokens() -> None:
    few, many = {PLAIN: [1.0], DIRECT: [0.2]}, {PLAIN: [10.0], DIRECT: [12.0]}
    shipped = {8: PLAIN, 99: PLAIN}
    assert decide({8: few, 99: many}, shipped) == {8: DIRECT, 99: PLAIN}
    assert decide({8: few, 99: many}, shipped, one_backend=True) == {8: PLAIN, 99: PLAIN}
    assert decide({8: few, 99: many | {DIRECT: [8.0]}}, shipped, one_backend=True) == {8: DIRECT, 99: DIRECT}
    with pytest.raises(ValueError, match="no backend gave a result for every"):
        decide({8: {PLAIN: [1.0]}, 99: {DIRECT: [1.0]}}, shipped, one_backend=True)


def _line(**changes: object) -> Line:
    choice = replace(as_choice(DIRECT), tiles=(("linear", LinearTile(t=128)), ("wgrad", WgradTile(n=64))))
    about = {"operator": "linear", "shape": (8, 4), "dtype": "float32", "tokens": 16, "choice": choice}
    return Line(**about | {"seconds": {DIRECT: 0.5}} | changes)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    save(HERE, [_line(), _line(tokens=None, choice=as_choice(PLAIN))], tmp_path)
    found = load(HERE, tmp_path)
    assert found.lines == (_line(), _line(tokens=None, choice=as_choice(PLAIN)))
    table = found.table("float32")
    few = choose("linear", shape=(8, 4), tokens=16, device_type="cuda", table=table)
    assert few.tile("wgrad") == WgradTile(n=64)
    assert few.tile("linear") == LinearTile(t=128)
    assert few.tile("linear_dx") is None
    assert choose("linear", shape=(8, 4), tokens=17, device_type="cuda", table=table).words == PLAIN
    assert choose("linear", shape=(9, 4), tokens=1, device_type="cuda", table=table) == TABLE[0].choice  # as shipped
    assert found.table("bfloat16") is TABLE
    told = choose("linear", shape=(8, 4), tokens=1, device_type="cuda", given="eager/whole", table=table)
    assert told.words == "eager/direct/whole"  # an argument comes before the table
    save(HERE, [_line(dtype="bfloat16")], tmp_path)
    assert {line.dtype for line in load(HERE, tmp_path).lines} == {"float32", "bfloat16"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"versions": {"torch": "0.1"}}, "was measured with {'torch': '0.1'}, but installed are"),
        ({"format": 99}, "format 99"),
        ({"lines": [{"operator": "linear"}]}, "KeyError: 'choice'"),
        ({"lines": [{"operator": "embedding", "choice": "triton/staged/fused"}]}, "embedding does not know staged"),
        (None, "JSONDecodeError"),
    ],
)
def test_a_table_that_does_not_hold_is_left_with_the_reason(tmp_path: Path, change: dict | None, why: str) -> None:
    path = save(HERE, [_line()], tmp_path)
    text = json.dumps(json.loads(path.read_text()) | change) if change is not None else path.read_text()[:50]
    path.write_text(text)
    found = load(HERE, tmp_path)
    assert found.lines == ()
    assert why in found.unused
    assert "odc-triton tune" in found.unused
    assert "ODC_TUNED=off" in found.unused


def _own_place(rank_count: int) -> Place:
    from odc_triton.sharding.backend import CpuBackend

    return CpuBackend().place([None] * rank_count)


def _sharded_with(folder: str) -> tuple[str, str, torch.Tensor, torch.Tensor]:
    """What runs for few and for many tokens, and a landed gradient beside plain torch's."""
    os.environ["ODC_TUNED"] = folder
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8, bias=False))
    plain = nn.Linear(4, 8, bias=False)
    plain.load_state_dict(model[0].state_dict())
    replace_layers(model, verbose=False)
    fully_shard(model, backend="cpu")
    parameter = engine_of(model).parameters[0]
    x = torch.randn(5, 4)
    with minibatch(model):
        model(x).square().sum().backward()
    plain(x).square().sum().backward()
    about = {"shape": (8, 4), "device_type": "cpu", "table": parameter.table}
    few, many = (choose("linear", tokens=tokens, **about).words for tokens in (5, 500))
    return few, many, parameter.sharded.grad.full_tensor(), plain.weight.grad


def _on_a_rank(rank: int, world: int, folder: str) -> tuple[str, str, str]:
    few, many, got, want = _sharded_with(folder)
    torch.testing.assert_close(got, want)
    with pytest.raises(RanksDiffer) as refused:
        _sharded_with(folder if rank else "off")
    return few, many, str(refused.value)


def test_layers_follow_it_and_ranks_that_read_different_ones_are_refused(tmp_path: Path) -> None:
    save(_own_place(2), [_line(choice=as_choice(FUSED))], tmp_path)
    for few, many, refused in ranks.run(_on_a_rank, 2, str(tmp_path)):
        assert (few, many) == (FUSED, PLAIN)
        assert refused.startswith("fully_shard: ranks [1] and rank 0 read different tuned tables")


def test_workloads_are_those_of_the_layers() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    replace_layers(model, roles=["attention", "embedding", "linear", "head"], verbose=False)
    assert workloads_of(model) == {
        Workload(operator="qkv", shape=(64, 16), kv_rows=32, head_dim=16, norm=True): 3,
        Workload(operator="embedding", shape=(50, 16)): 1,
        Workload(operator="linear", shape=(16, 64)): 3,
        Workload(operator="linear", shape=(24, 16)): 6,
        Workload(operator="linear", shape=(16, 24)): 3,
        Workload(operator="log_probs", shape=(50, 16)): 1,
    }


def test_experts_are_one_workload_and_one_decision() -> None:
    """Whichever of both projections' lines says gathered: then all of a layer's parameters are."""
    with torch.device("meta"):
        model = causal_lm("Mixtral")
        replace_layers(model, roles=["experts"], verbose=False)
    ((of, count),) = workloads_of(model).items()
    assert (of, count) == (Workload(operator="experts", shape=(5, 32, 48), up=(5, 96, 32), top_k=2), 2)
    assert list(ways(of, 8, device="cpu", apart=False, kernels=False)) == ["eager/direct/fused"]
    assert list(ways(of, 8, device="cuda", apart=True, kernels=True)) == [PLAIN, DIRECT, "triton/staged/fused"]
    for both in product((PLAIN, DIRECT), repeat=2):
        lines = zip(of.shapes, both, strict=True)
        table = [Entry(operator="experts", shape=shape, choice=as_choice(words)) for shape, words in lines]
        on_demand = of.experts.reads_on_demand("cuda", (*table, *TABLE))
        assert on_demand == (() if PLAIN in both else ("gate_up_proj", "down_proj"))


def test_the_shipped_way_is_measured_first_and_each_once() -> None:
    of = Workload(operator="linear", shape=(64, 64))
    assert list(ways(of, 8, device="cpu", apart=False, kernels=False)) == [PLAIN, FUSED]
    on_gpu = ways(of, 8, device="cuda", apart=True, kernels=True)
    assert next(iter(on_gpu)) == PLAIN
    assert FUSED not in on_gpu
    on_one = ways(of, 8, device="cuda", apart=True, kernels=True, shared=True)
    assert set(on_gpu) - set(on_one) == {"triton/staged/whole", "triton/staged/fused"}
    assert {choice.words for choice in on_gpu.values()} == set(on_gpu)
    table = Workload(operator="embedding", shape=(64, 64))
    assert next(iter(ways(table, 8, device="cuda", apart=True, kernels=True))) == DIRECT


@since("5.23", "rules take as many key heads as value heads")
@pytest.mark.parametrize("name", ["Qwen3_5Text", slow("KimiLinear"), slow("Bamba")])
def test_the_time_of_a_recurrent_layers_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which its FLOPs take 3 times as long as those of linear layers; of the real module's function."""
    config = config_of(name)
    with torch.device("meta"):
        module = recurrent_layers(AutoModelForCausalLM.from_config(config))[0]
    sizes, modeling = Decoder.of(config).recurrent, sys.modules[type(module).__module__]
    rule, called = RULES[sizes.rule], []
    function = getattr(modeling, rule)
    monkeypatch.setattr(modeling, rule, lambda *a, **k: called.append(rule) or function(*a, **k))

    def seconds(work: Callable[[], torch.Tensor]) -> float:
        called.clear()
        out = work()
        out.sum().backward()
        return 3 * 3.0 * sizes.flops * out.shape[1] if called else 6.0 * out.numel() * 64

    monkeypatch.setattr("odc_triton.tools.tune.attention._seconds", seconds)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    layers = {Workload(operator="linear", shape=(32, 64)): 2}
    assert measure_rule(sizes, module, layers, counts=[70, 130], rounds=1, **where) == pytest.approx(3)


def _config(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder / "config.json")


def test_the_command_writes_the_table_of_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("odc_triton.jobs.launcher.launch.launch", launch_among_tests)
    options = ["--init", _config(tmp_path), "--tokens", "4,32", "--rounds", "2", "--folder", str(tmp_path / "tuned")]
    assert main(["tune", *options, "--ranks", "2", "--operators", "linear,qkv,attention"]) == 0
    said = capsys.readouterr().out
    found = load(_own_place(2), tmp_path / "tuned")
    changed = sum(line.choice.words != PLAIN for line in found.lines)
    assert f"{changed} of 6 choices are clearly faster than the default" in said
    assert said.count("| chosen ") == changed
    assert said.count("| default, chosen ") == 6 - changed
    assert f"set ODC_TUNED={tmp_path / 'tuned'}. Runs here on 2 ranks with" in said
    assert len(re.findall(r" 1\.00x +\| default", said)) == 6
    (factor,) = found.attention.values()
    assert f"CostModel.from_config(config, attention={factor:.2f})" in said
    assert "linear 64 x 32" in said
    assert "the only way here" in said
    (key,) = found.attention
    assert key.startswith("float32: ")
    assert found.attention[key] > 0
    assert {(line.operator, line.shape, line.tokens) for line in found.lines} == {
        ("linear", shape, tokens) for shape in ((32, 32), (64, 32), (32, 64)) for tokens in (4, None)
    }
    for line in found.lines:
        assert set(line.seconds) == {PLAIN, FUSED}
        assert all(seconds > 0 for seconds in line.seconds.values())


def test_an_operator_that_runs_in_no_way_stops_no_others() -> None:
    """Its rows say why. What was measured with fewer tokens is kept, and counts for more."""
    ones, heap = {DIRECT: [1.0], PLAIN: [1.0]}, SimpleNamespace(device=torch.device("cpu"), apart=False, near=[0])
    found = {4: Measured(rounds=ones), 32: Measured(refused={PLAIN: "rank 0: out of memory", FUSED: "rank 1: also"})}
    trial: Any = SimpleNamespace(
        workload=Workload(operator="linear", shape=(8, 4)),
        dtype=torch.float32,
        engine=SimpleNamespace(heap=heap),
        pull_s=lambda **_: 0.0,
        measure=lambda *_, tokens, **__: found[tokens],
    )
    rows = [["32", PLAIN, "-", "", "rank 0: out of memory"], ["32", FUSED, "-", "", "rank 1: also"]]
    assert _tune(trial, TuneOptions(init=__file__, tokens="32", folder="."), HERE) == ([], rows)
    lines, told = _tune(trial, TuneOptions(init=__file__, tokens="4,32,64", folder="."), HERE)
    assert [line.tokens for line in lines] == [None]
    assert [row[:2] for row in told] == [["4", DIRECT], ["4", PLAIN], *(row[:2] for row in rows)]
    assert told[2:] == rows
    trial.workload = replace(trial.workload, operator="qkv")  # whose backend is one for all numbers of tokens
    with mock.patch("odc_triton.tools.tune.candidates.ways", return_value={PLAIN: None, FUSED: None}):
        assert _tune(trial, TuneOptions(init=__file__, tokens="32", folder="."), HERE) == ([], rows)


def _tuned(rank: int, world: int, options: dict) -> None:
    run_tune(TuneOptions(**options))


@pytest.mark.slow
def test_experts_by_kernels_have_a_line_for_each_projection(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(causal_lm("GptOss").config.to_json_string())  # with biases, transposed
    options = {"init": str(tmp_path), "tokens": "3,5", "folder": str(tmp_path), "operators": "experts", "rounds": 1}
    ranks.run(_tuned, 2, options | {"backend": "cpu-interpreter"})
    lines = load(replace(_own_place(2), backend="cpu-interpreter"), tmp_path).lines
    pairs = [(shape, count) for count in (6, None) for shape in ((5, 32, 96), (5, 48, 32))]
    assert [(line.shape, line.tokens) for line in lines] == pairs
    assert all({*line.seconds} == {"eager/direct/fused", DIRECT, "triton/staged/fused"} for line in lines)  # all right


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "12,x"}, "tokens is '12,x'; give whole numbers"),
        ({"tokens": "0"}, "give whole numbers of at least 1"),
        ({"operators": "linear,conv"}, "operators has conv; there are linear, qkv"),
        ({"rounds": 0}, "give at least 1"),
        ({"folder": None}, "ODC_TUNED=off"),
        ({"folder": f"{__file__}/new"}, r"--folder is .*, and .*test_tune\.py is a file: give a folder"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    right = {"init": _config(tmp_path), "tokens": "8", "folder": str(tmp_path)}
    assert TuneOptions(**right).counts == [8]
    with pytest.raises(ValueError, match=message):
        TuneOptions(**right | change)
