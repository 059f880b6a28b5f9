"""Predicted step times: ranks x microbatches x layers on a simulated clock; needs no device.

Names are resolved on first use. docs/simulator.md describes the model and its limits.
"""

from ..base.lazy import lazy_names

_HOME = {
    "DEVICES": "hardware",
    "Job": "job",
    "Links": "hardware",
    "MODELS": "models",
    "Model": "models",
    "Outcome": "lanes",
    "SETTINGS": "study",
    "draw": "study",
    "lengths_of_file": "study",
    "named_lengths": "study",
    "rank_settings": "study",
    "simulate": "run",
}
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
