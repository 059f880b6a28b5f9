"""vLLM's plugin: makes `--weight-transfer-config '{"backend": "odc"}'` known to its processes, workers too."""

from __future__ import annotations

NAME = "odc"


def register() -> None:
    """vLLM calls it in each of its processes, maybe more than once."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # a vLLM too old: it refuses the option itself
        return
    if NAME not in WeightTransferEngineFactory._registry:
        module = f"{__package__}.engine"
        WeightTransferEngineFactory.register_engine(NAME, module, "PolicyTransferEngine")
