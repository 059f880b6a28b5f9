"""What NVML's answers mean: which GPUs there are and what joins them; on snapshots of machines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from odc_triton.machine.probe import read_topology
from odc_triton.machine.topology import P2P, Topology
from tests.support.snapshots import KEYS, NAMES, load, topology


def test_every_snapshot_has_its_key_in_any_order() -> None:
    for name in NAMES:
        found = topology(name)
        shuffled = random.Random(0).sample(found.pairs, len(found.pairs))
        assert found.key == KEYS[name]
        assert replace(found, devices=found.devices[::-1], pairs=tuple(shuffled)).key == KEYS[name]
        assert any("not recorded" in line for line in load(name)["about"]), name
    assert set(NAMES) == set(KEYS)
    assert Topology().key == "cpu"


def test_a_part_has_the_key_of_what_joins_it() -> None:
    bridges = topology("a6000-bridges")
    uuids = [device.uuid for device in bridges.devices]
    assert bridges.only(uuids[:2]).key == "nvlink-4x14"
    assert bridges.only([uuids[0], uuids[3]]).key == "pcie-gen4x16"
    assert bridges.only(uuids[:1]).key == bridges.only([uuids[0][4:].upper()]).key == "one-gpu"
    assert bridges.only([None, "GPU-of-elsewhere"]).key == "cpu"


def test_what_joins_pairs() -> None:
    for name, nvlinks, switch, gbs in (
        ("hgx-h100-nvswitch", 18, True, 18 * 26.562),
        ("a6000-bridges", 4, False, 4 * 14.062),
        ("pcie-only", 0, False, 16 * 1.969),
    ):
        pair = topology(name).pairs[0]
        assert (pair.nvlinks, pair.through_switch) == (nvlinks, switch), name
        assert pair.gbs == pytest.approx(gbs), name


def test_the_slower_slot_counts() -> None:
    snapshot = load("pcie-only")
    snapshot["devices"][1]["pcie_width_max"] = 8
    pairs = read_topology(snapshot, ()).pairs
    assert (pairs[0].kind, pairs[0].gbs) == ("pcie-gen4x8", pytest.approx(8 * 1.969))
    snapshot["devices"][1]["pcie_width_max"] = None
    pairs = read_topology(snapshot, ()).pairs
    assert (pairs[0].kind, pairs[0].gbs) == ("pcie-gen4x16", None)


def test_links_that_are_down_partitioned_or_hidden() -> None:
    snapshot = load("hgx-h100-nvswitch")
    snapshot["devices"][2]["links"][0]["active"] = 0
    found = read_topology(snapshot, ())
    assert found.only(found.devices[at].uuid for at in (2, 5)).pairs[0].nvlinks == 14
    assert found.key == "nvswitch-14x25+nvswitch-18x25"

    for entry in snapshot["pairs"]:
        entry["nvlink"] = P2P.NOT_SUPPORTED  # in another partition of the fabric
    assert {pair.nvlinks for pair in read_topology(snapshot, ()).pairs} == {0}

    snapshot = load("hgx-h100-nvswitch")
    for device in snapshot["devices"]:  # as in a virtual machine
        for link in device["links"]:
            link |= {"remote_type": 255, "remote_bus_id": "FFFFFFFF:FF:00.0"}
    assert read_topology(snapshot, ()).key == "nvswitch-18x25"


@pytest.mark.parametrize("ends", [(4, 2), (0, 4)])
def test_links_that_are_up_at_one_end_only_do_not_count(ends: tuple[int, int]) -> None:
    snapshot = load("a6000-bridges")
    for device, up in zip(snapshot["devices"], ends, strict=False):
        link = device["links"][0]
        device["links"] = [link | {"count": up}, link | {"count": 4 - up, "active": 0}]
    found = read_topology(snapshot, ())
    (pair,) = found.only(device.uuid for device in found.devices[:2]).pairs
    joined = min(ends)
    assert pair.nvlinks == joined
    assert pair.kind == (f"nvlink-{joined}x14" if joined else "pcie-gen4x16")
    assert pair.gbs == pytest.approx(joined * 14.062 if joined else 16 * 1.969)


def test_atomics_by_the_links_where_the_driver_does_not_say_of_the_pair() -> None:
    for of_a_link, said in ((1, "OK"), (0, "UNKNOWN")):
        snapshot = load("a6000-bridges")
        for entry in snapshot["pairs"]:
            entry.pop("atomics", None)
        snapshot["devices"][0]["links"][0]["atomics"] = of_a_link
        first = read_topology(snapshot, ()).pairs[0]
        assert (first.nvlinks, first.atomics.name) == (4, said)


@pytest.mark.parametrize("places", [(7, 0, 3)])
def test_a_mask_is_undone_by_uuid(places: tuple[int, ...]) -> None:
    found = topology("hgx-h100-nvswitch", *places)
    assert {device.cuda_index: device.index for device in found.devices if device.cuda_index is not None} == dict(
        enumerate(places)
    )
    assert len(found.devices) == 8
    assert found.visible().key == ("one-gpu" if len(places) == 1 else "nvswitch-18x25")
