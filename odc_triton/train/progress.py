"""The progress bar: how far, how long still, and how the last step went."""

from __future__ import annotations

import threading

from tqdm import tqdm

from odc_triton.train.metrics import Metrics


class Progress:
    """Steps done of `total`, with the time left. Quiet without a terminal, and where it is not `shown`."""

    def __init__(self, *, total: int, done: int, shown: bool) -> None:
        # Its own lock is a named semaphore, which a killed rank would leave behind; here is one thread.
        tqdm.set_lock(threading.RLock())
        # None: quiet without a terminal
        self._bar = tqdm(total=total, initial=done, unit="step", disable=None if shown else True)

    def show(self, metrics: Metrics) -> None:
        """One step more, with its numbers."""
        numbers = {
            "loss": f"{metrics['loss']:.4f}",
            "targets/s": f"{metrics['target_tokens_per_s']:.0f}",
            "idle": f"{metrics['idle']:.0%}",
        }
        if "eval_loss" in metrics:
            numbers["eval"] = f"{metrics['eval_loss']:.4f}"
        self._bar.set_postfix(numbers, refresh=False)
        self._bar.update()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
