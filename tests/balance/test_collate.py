"""Collation without padding. test_split_samplers.py has DataLoaders."""

from __future__ import annotations

import pytest
import torch

from odc_triton.balance import count_target_tokens, pack_collate, to_device
from odc_triton.plan.entries import Segment

BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def test_a_pack_is_its_documents_end_to_end():
    first = {"input_ids": [7, 8, 9], "labels": [-100, 8, 9]}
    second = {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([4, 5]), "text": "left out"}
    (packed,) = pack_collate([[first, second]])
    assert packed.keys() == {"input_ids", "position_ids", "labels", "target_positions", *BOUNDS}
    assert packed["input_ids"].tolist() == [[7, 8, 9, 4, 5]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert packed["labels"].tolist() == [[-100, 8, 9, -100, 5]]
    assert packed["cu_seq_lens_q"].tolist() == packed["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert (packed["max_length_q"], packed["max_length_k"]) == (3, 3)
    assert packed["target_positions"].tolist() == [0, 1, 3]
    for name, value in packed.items():
        dtype = {"cu": torch.int32, "ma": None}.get(name[:2], torch.int64)
        assert getattr(value, "dtype", None) == dtype, name
    assert second["labels"].tolist() == [4, 5]  # the caller's tensors are left alone


def test_a_sample_of_several_documents_beside_a_segment():
    several = {"input_ids": [7, 8, 9], "position_ids": [0, 1, 0]}
    segment = Segment(5, 0, 2)
    (packed,) = pack_collate([[several, {"input_ids": [4, 5], "segment": segment}]])
    assert packed["cu_seq_lens_q"].tolist() == [0, 2, 3, 5]
    assert packed["segments"] == (None, None, segment)
    assert packed["shift_labels"].tolist() == [[8, 9, -100, 5, -100]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pack_goes_to_a_device(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    (pack,) = pack_collate([[{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]])
    here = to_device(pack | {"name": "kept"}, device)
    assert here.pop("name") == "kept"
    assert here.keys() == pack.keys()
    for name, value in pack.items():
        if isinstance(value, torch.Tensor):
            assert here[name].device.type == device
            assert here[name].tolist() == value.tolist()
        else:
            assert here[name] == value
    assert here["cu_seq_lens_q"]._odc_bounds == (0, 3, 4)


def test_labels_default_to_the_input_and_targets_are_counted():
    packs = pack_collate([[{"input_ids": [1, 2, 3]}], [{"input_ids": [4]}, {"input_ids": [5, 6], "labels": None}]])
    assert packs[0]["labels"].tolist() == [[-100, 2, 3]]
    assert packs[1]["labels"].tolist() == [[-100, -100, 6]]
    assert count_target_tokens(packs) == 3
    assert pack_collate([]) == []
    assert count_target_tokens([]) == 0


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        ([], "pack 1 has no samples"),
        ({"input_ids": [[1, 2]]}, "wrap the data set in PackedDataset"),
        (["input_ids"], "pack 1 has a str: a sample is a dict with input_ids"),
        ((1, 2), "pack 1 is a tuple, not a list of samples: wrap the data set in PackedDataset"),
        ([{"tokens": [1]}], r"sample 0 has \['tokens'\]: it needs input_ids"),
        ([{"input_ids": [1, 0], "attention_mask": [1, 0]}], "sample 0 is padded"),
        ([{"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}], "sample 0 is padded"),
        ([{"input_ids": [1, 2]}, {"input_ids": "text"}], "sample 1: input_ids is no tensor"),
        ([{"input_ids": [1, 2], "labels": [1, [2]]}], "sample 0: labels is no tensor"),
        ([{"input_ids": [1, 2], "position_ids": [0]}], "sample 0: 1 position_ids for 2 input_ids"),
        ([{"input_ids": [1, 2], "position_ids": [1, 2], "segment": Segment(0, 0, 2)}], "only those from 0 up"),
        ([{"input_ids": [1, 2], "position_ids": [[0, 1]] * 3}], "sample 0: position_ids has shape"),
        ([{"input_ids": [1, 2], "inputs_embeds": [[0.5], [1]]}], "sample 0 has inputs_embeds, which packs can't"),
        ([{"input_ids": [1, 2], "token_type_ids": [0, 1]}], "tokens of images and no pixel_values"),
        ([{"input_ids": []}], "pack 1, sample 0: input_ids has shape"),
        ([{"input_ids": [[1, 2]]}], r"shape \(1, 2\)"),
        ([{"input_ids": [1.5, 2.0]}], "dtype torch.float32"),
        ([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1]}], "sample 1: 1 labels for 2 input_ids"),
    ],
)
def test_refused(pack, message):
    with pytest.raises(ValueError, match=message):
        pack_collate([[{"input_ids": [1]}], pack])
