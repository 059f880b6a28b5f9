"""Which pairs of GPUs are refused, why, and with what remedy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from odc_triton import fully_shard
from odc_triton.machine.probe import read_topology
from odc_triton.machine.topology import P2P, Gpu, Pair, Topology
from odc_triton.machine.unusable import refuse_unusable, unusable_pairs, usable_groups
from odc_triton.sharding.backend import CpuBackend
from tests.support import ranks
from tests.support.snapshots import load, topology


@pytest.mark.parametrize(
    ("name", "bad", "of", "groups"),
    [("hgx-h100-nvswitch", 0, 28, [8]), ("a6000-bridges", 4, 6, [2, 2]), ("pcie-only", 6, 6, [1, 1, 1, 1])],
)
def test_unusable_pairs_and_groups(name: str, bad: int, of: int, groups: list[int]) -> None:
    found = topology(name)
    by_reason = unusable_pairs(found)
    told = [pair for pairs in by_reason.values() for pair in pairs]
    assert set(told) == {pair for pair in found.pairs if pair.is_unusable}
    assert (len(told), len(found.pairs)) == (bad, of)
    assert len({reason for reason, _ in by_reason}) == len(by_reason)  # a reason has one remedy
    assert [len(group) for group in usable_groups(found)] == groups
    for group in usable_groups(found):
        assert not unusable_pairs(found.only(device.uuid for device in group))


@pytest.mark.parametrize(
    ("statuses", "reason", "remedy"),
    [
        ((0, 0, 1), "no native atomics over PCIe .the chipset", "only NVLink has native atomics"),
        ((0, 5, 5), "can't write to each other's memory: the driver", "host enable"),
        ((1, 1, 1), "can't read each other's memory: the chipset", "IOMMU .* ACS"),
        ((2, 2, 2), "this model of GPU", "use one GPU"),
        ((3, 3, 3), "different PCIe roots", "use one GPU"),
        ((4, 4, 4), "the driver's settings", "NVreg"),
    ],
)
def test_each_reason_has_its_remedy(statuses: tuple[int, int, int], reason: str, remedy: str) -> None:
    snapshot = load("pcie-only")
    snapshot["pairs"] = [{"of": [[0, 1]], **dict(zip(("read", "write", "atomics"), statuses, strict=True))}]
    found = read_topology(snapshot, ())
    uuids = [device.uuid for device in found.devices[:2]]
    with pytest.raises(RuntimeError, match=f"(?s)rank 0 on GPU0 .*rank 1 on GPU1 .*{reason}.*(?i:{remedy})"):
        refuse_unusable(found, uuids)
    refuse_unusable(found, [found.devices[0].uuid, found.devices[2].uuid])  # of which nothing is known


def test_pairs_with_another_reason_are_not_counted() -> None:
    snapshot, statuses = load("pcie-only"), ("read", "write", "atomics")
    refused = {(0, 1): (0, 0, 1), (0, 2): (0, 0, 1), (1, 2): (3, 3, 3)}
    snapshot["pairs"] = [{"of": [pair], **dict(zip(statuses, said, strict=True))} for pair, said in refused.items()]
    found = read_topology(snapshot, ())
    with pytest.raises(RuntimeError, match=r"no native atomics .* The same holds for 2 of 3 pairs"):
        refuse_unusable(found, [device.uuid for device in found.devices[:3]])


def test_which_ranks_are_refused() -> None:
    found = topology("a6000-bridges")
    uuids = [device.uuid[4:] for device in found.devices]  # as torch writes them
    for fine in (uuids[:2], [uuids[0]] * 3, [None, None], [uuids[0], "GPU-of-elsewhere"], []):
        refuse_unusable(found, fine)
    with pytest.raises(RuntimeError) as caught:
        refuse_unusable(found, [uuids[2], uuids[2], uuids[3], uuids[1]])
    text = str(caught.value)
    assert "rank 0 on GPU2 (NVIDIA RTX A6000, 00000000:CA:00.0) and rank 3 on GPU1" in text
    assert "CUDA_VISIBLE_DEVICES=2,3" in text
    assert "2 of 3 pairs" in text


def in_groups(*groups: tuple[int, ...]) -> Topology:
    """GPUs by number, NVLink within each group, PCIe without native atomics between them."""
    devices = {n: Gpu(index=n, uuid=f"GPU-{n}") for n in sorted(itertools.chain(*groups))}
    of = {n: group for group in groups for n in group}
    fine = {"read": P2P.OK, "write": P2P.OK}
    pairs = tuple(
        Pair(one=devices[a], other=devices[b], atomics=P2P.OK, nvlinks=4, **fine)
        if of[a] == of[b]
        else Pair(one=devices[a], other=devices[b], atomics=P2P.CHIPSET_NOT_SUPPORTED, **fine)
        for a, b in itertools.combinations(devices, 2)
    )
    return Topology(devices=tuple(devices.values()), pairs=pairs)


@pytest.mark.parametrize(
    ("groups", "of_ranks", "remedy"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), range(8), "2 groups of 4 GPUs can: give --replicas 2, .*\\(2, 4\\)"),
        (((0, 4), (1, 5), (2, 6), (3, 7)), range(8), "--replicas 4, .*keep .*VISIBLE_DEVICES=0,4,1,5,2,6,3,7"),
        (((0, 1, 2), (3, 4, 5), (6,)), range(7), "2 groups of 3 .*VISIBLE_DEVICES=0,1,2,3,4,5"),
        (((0, 1, 2, 3), (4, 5), (6, 7)), range(8), "use GPUs that can: .*VISIBLE_DEVICES=0,1,2,3"),
        (((0,), (1,), (2,)), range(3), "use one GPU"),
    ],
)
def test_the_remedy_follows_from_the_matrix(groups: tuple, of_ranks: Sequence[int], remedy: str) -> None:
    found = in_groups(*groups)
    with pytest.raises(RuntimeError, match=f"(?is){remedy}") as caught:
        refuse_unusable(found, [f"GPU-{number}" for number in of_ranks])
    is_in_order = "VISIBLE_DEVICES" not in remedy and "replicas" in remedy
    assert ("VISIBLE_DEVICES" in str(caught.value)) != (is_in_order or "one GPU" in remedy)


def _one_rank_finds(rank: int, world: int) -> list[str]:
    from torch import nn

    def finds(self: CpuBackend, devices: list[str | None]) -> str:
        return "GPU0 and GPU1 can't be peers. Use one"

    def breaks(self: CpuBackend, devices: list[str | None]) -> str:
        raise OSError("no answer")

    said = []
    for answer in (finds, breaks):
        if rank == 1:
            CpuBackend.unusable_peers = answer
        with pytest.raises((RuntimeError, OSError)) as caught:
            fully_shard(nn.Linear(2, 2))
        said.append(str(caught.value))
    return said


def test_all_ranks_refuse_what_one_of_them_finds_or_cannot_ask() -> None:
    found = "fully_shard: rank 1 finds that GPU0 and GPU1 can't be peers. Use one"
    broken = "fully_shard: rank 1 could not shard its model: OSError: no answer"
    assert ranks.run(_one_rank_finds, 2) == [[found, broken], [found, "no answer"]]
