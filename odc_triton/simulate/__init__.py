"""Predicted step times: ranks x microbatches x layers on a simulated clock; needs no device.

Names are resolved on first use. docs/simulator.md describes the model and its limits.
"""

from ..base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
