"""The driver's answers kept as JSON, and given again: a machine for tests, or a look at one that is elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from .nvml import DeviceAnswers, LinkAnswers, Nvml, PairAnswers


class SnapshotNvml:
    """Answers from what `Recorder.snapshot` gave, or from the same written by hand.

    Links that are alike and follow each other are one entry with a `count`; pairs that are alike are one entry whose
    `of` lists them, as positions in `devices`. Raises TypeError for an answer that nobody asks for.
    """

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        self.missing: str | None = snapshot.get("missing")
        self._snapshot = snapshot
        self._devices = [_device_of(entry) for entry in snapshot.get("devices", ())]
        self._pairs: dict[frozenset[str], PairAnswers] = {}
        for entry in snapshot.get("pairs", ()):
            answers = PairAnswers(**{name: value for name, value in entry.items() if name != "of"})
            for one, other in entry["of"]:
                self._pairs[frozenset((self._devices[one].uuid, self._devices[other].uuid))] = answers

    def driver_version(self) -> str | None:
        return self._snapshot.get("driver_version")

    def cuda_version(self) -> str | None:
        return self._snapshot.get("cuda_version")

    def devices(self) -> list[DeviceAnswers]:
        return list(self._devices)

    def pair(self, one: str, other: str) -> PairAnswers:
        return self._pairs.get(frozenset((one, other)), PairAnswers())


class Recorder:
    """Passes questions on and keeps the answers; `snapshot()` is all that was asked so far, ready for JSON."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self.missing = nvml.missing
        self._answers: dict[str, Any] = {"missing": nvml.missing}
        self._devices: list[DeviceAnswers] = []
        self._pairs: dict[tuple[str, str], PairAnswers] = {}

    def driver_version(self) -> str | None:
        return self._answers.setdefault("driver_version", self._nvml.driver_version())

    def cuda_version(self) -> str | None:
        return self._answers.setdefault("cuda_version", self._nvml.cuda_version())

    def devices(self) -> list[DeviceAnswers]:
        self._devices = self._nvml.devices()
        return list(self._devices)

    def pair(self, one: str, other: str) -> PairAnswers:
        return self._pairs.setdefault((one, other), self._nvml.pair(one, other))

    def snapshot(self) -> dict[str, Any]:
        place = {device.uuid: number for number, device in enumerate(self._devices)}
        alike: dict[PairAnswers, list[list[int]]] = {}
        for (one, other), answers in self._pairs.items():
            alike.setdefault(answers, []).append([place[one], place[other]])
        known = {name: value for name, value in self._answers.items() if value is not None}
        return known | {
            "devices": [_entry_of(device) for device in self._devices],
            "pairs": [{"of": of} | _known(answers) for answers, of in alike.items() if _known(answers)],
        }


def _known(answers: LinkAnswers | DeviceAnswers | PairAnswers) -> dict[str, Any]:
    return {name: value for name, value in asdict(answers).items() if value is not None}


def _entry_of(device: DeviceAnswers) -> dict[str, Any]:
    links = [{"count": len(list(run))} | _known(link) for link, run in groupby(device.links)]
    return _known(device) | {"links": links}


def _device_of(entry: Mapping[str, Any]) -> DeviceAnswers:
    links: list[LinkAnswers] = []
    for link in entry.get("links", ()):
        answers = {name: value for name, value in link.items() if name != "count"}
        links += [LinkAnswers(**answers)] * link.get("count", 1)
    capability = entry.get("compute_capability")
    changed = {"links": tuple(links), "compute_capability": None if capability is None else tuple(capability)}
    return DeviceAnswers(**{**entry, **changed})
