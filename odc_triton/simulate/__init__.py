"""What a step would take: ranks x microbatches x layers by a clock of its own, no device and no torch needed.

Names are resolved on first use. docs/simulator.md says what is modelled and what is not.
"""

from __future__ import annotations

import importlib

_HOME = {
    "DEVICES": "devices",
    "Job": "job",
    "Links": "links",
    "MODELS": "models",
    "Model": "models",
    "Outcome": "outcome",
    "SETTINGS": "study",
    "draw": "lengths",
    "lengths_of_file": "lengths",
    "SequenceTime": "measured",
    "from_measured": "measured",
    "named_lengths": "lengths",
    "rank_settings": "study",
    "simulate": "job",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'odc_triton.simulate' has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
