"""A vLLM worker that reads the policy of a running job, and loads it where vLLM's own layout has it.

vLLM's layerwise reload takes weights at any time, also where they were packed or quantised after loading. It keeps the
tensors of a layer until all of them have come, so views of the trainers' memory are copied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ...policy.reader import PolicyReader, read_policy
from .policy_server import difference


@dataclass
class PolicyAddress(WeightTransferInitInfo):
    """`address`: of the job's offer."""

    address: str


@dataclass
class PolicyUpdate(WeightTransferUpdateInfo):
    """Nothing: the newest version is read."""


class PolicyTransferEngine(WeightTransferEngine[PolicyAddress, PolicyUpdate]):
    """The worker's side; the trainers have none. An update that fails leaves the model partly loaded."""

    init_info_cls = PolicyAddress
    update_info_cls = PolicyUpdate
    _reader: PolicyReader | None = None

    def init_transfer_engine(self, init_info: PolicyAddress) -> None:
        """Raises PolicyUnavailable if there is no policy, ValueError for another model's."""
        self.shutdown()
        self._reader = reader = read_policy(init_info.address)
        config = self.model_config
        problem = difference(config.hf_config.to_dict(), reader.config or {})
        if (dtype := str(config.dtype).removeprefix("torch.")) not in reader.dtypes:
            wanted = ", ".join(sorted(reader.dtypes))
            problem = problem or f"computes in {dtype}, and the policy in {wanted}: start it with --dtype {wanted}"
        if problem is not None:
            self.shutdown()
            raise ValueError(f"vLLM's model {config.model} {problem}")

    def start_weight_update(self) -> None:
        """Nothing: a read may be repeated, and each starts anew."""

    def receive_weights(self, update_info: PolicyUpdate) -> None:
        """Raises PolicyUnavailable if the job ended."""
        if self._reader is None:
            raise RuntimeError("there is no address of a policy yet: call init_weight_transfer_engine first")
        self._reader.read(self._load)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)
        finally:  # else the next load would go on with this one's
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        """Nothing, as at the start."""

    def shutdown(self) -> None:
        """Closes the reader."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
