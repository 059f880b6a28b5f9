"""What a step would take: ranks x microbatches x layers by a clock of its own, no device and no torch needed.

Names are resolved on first use. docs/simulator.md says what is modelled and what is not.
"""

from ..base.lazy import lazy_names

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
__getattr__, __dir__, __all__ = lazy_names(__name__, _HOME)
