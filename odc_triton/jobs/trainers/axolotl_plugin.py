"""`AxolotlPlugin`: axolotl's models of FSDP2 train by on-demand communication, for one line in its YAML."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]

from ...fsdp2.unmodified import Unmodified, say


class AxolotlPlugin(BasePlugin):
    """With `fsdp_version: 2`, and from training's first forward to its end; checkpoints and what is saved stay FSDP2's.

        plugins: [odc_triton.hf.AxolotlPlugin]

    What can't be trained so stays on plain FSDP2. Rank 0 says why, and at the end what was trained.
    """

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        self._training = ExitStack()
        self._training.callback(say, self._training.enter_context(Unmodified()))

    def post_train(self, cfg: Any, model: Any) -> None:
        """axolotl calls it after training, and again after saving."""
        self._training.close()
