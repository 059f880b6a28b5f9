"""vLLM for ODCGRPOTrainer: TRL's VLLMGeneration, which gets the weights of a sharded model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from ..checkpoint.pretrained_tensors import PretrainedTensors

if TYPE_CHECKING:
    from trl import GRPOTrainer


class ShardedVllmGeneration(VLLMGeneration):
    """VLLMGeneration of a trainer whose model is sharded; made after TRL's constructor, from the same arguments.

    In colocate mode vLLM reloads its weights layer by layer, which also takes weights that it packed or quantised when
    it had loaded them. Each rank reads the policy itself, and none waits for another.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        args = trainer.args
        given: dict[str, Any] = {}
        for name in inspect.signature(VLLMGeneration).parameters:  # TRL's names, with and without vllm_
            for field in (f"vllm_{name}", name):
                if hasattr(args, field):
                    given[name] = getattr(args, field)
        super().__init__(
            model=trainer.model,
            accelerator=trainer.accelerator,
            processing_class=trainer.processing_class,
            max_num_seqs=args.per_device_train_batch_size * args.vllm_tensor_parallel_size * args.steps_per_generation,
            **given,
        )

    def _init_vllm(self) -> None:
        if self.mode == "colocate" and not self.model.name_or_path:
            raise ValueError(
                "use_vllm is set, and vLLM loads the model from its folder or hub id, which is unknown: load the model "
                "by from_pretrained, or set model.name_or_path"
            )
        super()._init_vllm()

    def _iter_named_params(self) -> Iterator[tuple[str, Tensor]]:
        """Reloads all weights at once; nothing is left that TRL would load tensor by tensor."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(PretrainedTensors(self.model))})
        return iter(())
