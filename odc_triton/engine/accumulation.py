"""accelerate's gradient accumulation in a minibatch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def undivided() -> Iterator[None]:
    """Meanwhile `Accelerator.backward` does not divide the loss by `gradient_accumulation_steps`.

    A minibatch with tokens has any number of backwards, whose losses are divided by all ranks' tokens already.
    """
    state = getattr(sys.modules.get("accelerate.state"), "GradientState", None)
    if state is None:
        yield
        return
    options = state().plugin_kwargs  # as the setter of Accelerator.gradient_accumulation_steps does
    steps = options.get("num_steps", 1)
    options["num_steps"] = 1
    try:
        yield
    finally:
        options["num_steps"] = steps
