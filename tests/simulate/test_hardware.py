"""What a simulation is made of: links, shared ports, lengths, models, memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odc_triton.jobs.data.lengths import read_lengths
from odc_triton.tools.simulate.hardware import DEVICES, Links, find_device, read_seconds, slowdown
from odc_triton.tools.simulate.models import Model
from odc_triton.tools.simulate.study import NAMED, draw, lengths_of_file, log_normal, named_lengths
from tests.support.records import tokenized


def test_readers_share_an_owner() -> None:
    """Of 3 ranks each pulls two shards; two that pull from one owner at once get half of it each."""
    assert read_seconds([0, 100, 200]) == [[2.0]] * 3
    # In step, no two readers are ever at one owner.
    assert read_seconds([0] * 3, rounds=2) == [[2.0, 2.0]] * 3
    # 0 reads 1, 2; 1 reads 2, 0. From 1 to 3 both are at owner 2.
    assert [each[0] for each in read_seconds([0, 1, 100])] == pytest.approx([3, 3, 2])


def test_readers_out_of_step_meet_at_ports() -> None:
    """Who once shares a port leaves it together for the next one: the convoy stays. Twice as long and no more."""
    assert 1.3 < slowdown(8, rounds=6) < 2.0
    assert slowdown(2) == 1.0
    assert [slowdown(ranks) for ranks in (16, 32)] == [1.5948788910788623, 1.7010677835238723]  # bits as recorded


class _Looked(list):
    looks = 0

    def __getitem__(self, key: Any) -> Any:
        self.looks += 1
        return super().__getitem__(key)


def test_who_has_begun_is_not_looked_at_again_for_each_shard() -> None:
    """As it was, which took minutes for 256 readers."""
    starts = _Looked(n / 4 for n in range(32))
    read_seconds(starts)
    assert starts.looks < 32 * 31  # shards


def test_reads_and_collectives_in_seconds() -> None:
    links = Links(gpus=4, gbs=100.0, nodes=2, nic_gbs=10.0, latency_s=1e-3, nic_latency_s=2e-3)
    assert links.ranks == 8
    assert links.read_s(8e9) == pytest.approx(3 * (slowdown(4) * 2e9 / 100e9 + 1e-3))
    assert links.collective_s(8e9) == pytest.approx(6e9 / 100e9 + 3e-3)
    assert links.replicas_s(2e9) == pytest.approx(1e9 / 10e9 + 2e-3)
    assert Links(gpus=4, gbs=100.0).replicas_s(2e9) == 0.0
    assert Links.none(4).read_s(8e9) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [({"gpus": 0}, "gpus is 0"), ({"gbs": math.nan}, "gbs is nan"), ({"nic_gbs": 0.0}, "nic_gbs is 0.0")],
)
def test_links_that_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Links(**{"gpus": 2, "gbs": 1.0, **change})


@pytest.mark.parametrize("name", NAMED)
def test_named_lengths_have_the_published_mean_and_maximum(name: str) -> None:
    wanted, drawn = NAMED[name], np.array(named_lengths(name, 40_000))
    # Standard error of 40,000 draws with a deviation of 0.65 to 1.2 means: 0.33% to 0.6%.
    assert drawn.mean() == pytest.approx(wanted.mean, rel=0.015)
    assert drawn.min() >= 1
    assert 0.9 * wanted.longest < drawn.max() <= wanted.longest
    mu, sigma = log_normal(wanted)
    beyond = 0.5 * math.erfc((math.log(wanted.longest) - mu) / sigma / math.sqrt(2))
    assert beyond == pytest.approx(0.01, rel=1e-6)
    assert named_lengths(name, 50, seed=3) == named_lengths(name, 50, seed=3) != named_lengths(name, 50, seed=4)


def test_lengths_from_files(tmp_path: Path) -> None:
    def read(name: str, text: str) -> list[int]:
        (tmp_path / name).write_text(text)
        return lengths_of_file(tmp_path / name)[0]

    assert read("a.txt", "5 7\n\n 9 \n") == [5, 7, 9]
    assert read_lengths(tmp_path / "a.txt", 7) == [5, 7, 7]
    assert read("a.json", "[5, 7.0]") == [5, 7]
    lines = ['{"length": 5}', '{"tokens": 6}', '{"input_ids": [1, 2, 3]}', "8"]
    assert read("a.jsonl", "\n".join(lines) + "\n") == [5, 6, 3, 8]
    assert "estimated" not in lengths_of_file(tmp_path / "a.jsonl")[1]
    lines = ['{"text": "twelve bytes"}', '{"prompt": "four", "completion": "five!"}']
    assert read("b.jsonl", "\n".join(lines)) == [3, 3]
    assert "estimated at 4 bytes per token" in lengths_of_file(tmp_path / "b.jsonl")[1]
    tokenized(tmp_path, {"text": "a"}, {"text": "abcde"}).save(tmp_path / "c.npz")
    assert lengths_of_file(tmp_path / "c.npz")[0] == [3, 7]


def test_drawn_minibatches() -> None:
    lengths = list(range(1, 11))
    drawn = draw(lengths, samples=4, minibatches=5, seed=1)
    assert [len(each) for each in drawn] == [4] * 5
    assert all(len(set(each)) == 4 for each in drawn)
    assert len(set(drawn[0] + drawn[1])) == 8, "a pass over the data repeats nothing"
    assert drawn == draw(lengths, samples=4, minibatches=5, seed=1) != draw(lengths, samples=4, minibatches=5, seed=2)
    with pytest.raises(ValueError, match=r"10 sequences can't fill a minibatch of 16 \(ranks x samples per rank\)"):
        draw(lengths, samples=16, minibatches=1)


def test_devices() -> None:
    assert find_device("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert find_device("Tesla V100-SXM2-32GB") is DEVICES["v100"]
    with pytest.raises(ValueError, match="the GPU 'GTX 480' is not known: give --gpu, one of v100"):
        find_device("GTX 480")
    for other in ("NVIDIA GH200 480GB", "NVIDIA RTX A1000"):
        with pytest.raises(ValueError, match="give --gpu, one of"):
            find_device(other)


def test_models_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'qwen9' is neither known nor there: give one of qwen2.5-0.5b"):
        Model.find("qwen9")
    with pytest.raises(ValueError, match="is neither known nor there"):
        Model.find(str(tmp_path))  # a folder without a config
    for text, message in (
        ("{}", "model_type"),
        # What training refuses: not causal, Mamba-1's state across documents, no decoder.
        (
            '{"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}',
            "simulated: BertLM.* trained on",
        ),
        ('{"model_type": "jamba", "num_hidden_layers": 8, "num_experts": 2}', "JambaForCausalLM can't be trained"),
        ('{"model_type": "t5"}', "can't make a causal LM of this config"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Model.find(str(tmp_path))
