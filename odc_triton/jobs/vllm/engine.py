"""vLLM's side: a worker that reads the policy of a running job, and vLLM in a rank's process.

vLLM's layerwise reload takes weights at any time, also where they were packed or quantised after loading. It keeps the
tensors of a layer until all of them have come, so views of the trainers' memory are copied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.models import ModelRegistry, supports_lora
from vllm.platforms import current_platform

from ...base.errors import GenerationFailed
from ...checkpoint.adapted import read_config
from ...checkpoint.adapter import lora_factors
from ...checkpoint.pretrained_tensors import PretrainedTensors
from ...policy.reader import PolicyReader, read_policy
from .adapter import adapter_folder, takes_adapter
from .policy_server import difference


@dataclass
class PolicyAddress(WeightTransferInitInfo):
    """`address`: of the job's offer."""

    address: str


@dataclass
class PolicyUpdate(WeightTransferUpdateInfo):
    """The newest version is read; with `adapter`, names in its files, nothing: vLLM says if it takes them."""

    adapter: list[str] | None = None


def require_adaptable(config: Any, model: Any, names: Iterable[str]) -> None:
    """Raises ValueError for a base other than its files, and for a tensor of PEFT's that vLLM would drop silently."""
    if config.model_config.quantization or config.load_config.load_format == "dummy":
        raise ValueError(f"vLLM's base is quantised ({config.model_config.quantization}) or not loaded from its files")
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if (manager := getattr(model, "lora_manager", None)) is None:
        raise ValueError("vLLM was started without enable_lora")
    known = {*manager.modules}.union(*manager.packed_modules.values())
    for name in names:
        if parse_fine_tuned_lora_name(name, mapper and mapper.get_rename_mapper())[0] not in known:
            raise ValueError(f"vLLM's model has no place for {name}")


def adapts(folder: str) -> bool:
    """False if vLLM takes no adapters of the model in `folder`."""
    known, names = ModelRegistry.models, read_config(folder).architectures or []
    return all(supports_lora(known[name].load_model_cls()) for name in names if name in known)


def refuse_unpacked_experts(config: Any) -> None:
    if current_platform.is_cpu() and config.is_moe:
        raise ValueError("vLLM on CPUs computes experts wrongly after an update: let the model itself sample")


class PolicyTransferEngine(WeightTransferEngine[PolicyAddress, PolicyUpdate]):
    """The worker's side; the trainers have none. An update that fails leaves the model partly loaded."""

    init_info_cls = PolicyAddress
    update_info_cls = PolicyUpdate
    _reader: PolicyReader | None = None
    _has_base = True  # not another policy in its place

    def init_transfer_engine(self, init_info: PolicyAddress) -> None:
        """Raises PolicyUnavailable if there is no policy, ValueError for another model's."""
        self.shutdown()
        self._reader = reader = read_policy(init_info.address)
        config = self.model_config
        problem = difference(config.hf_config.to_dict(), reader.config or {})
        if (dtype := str(config.dtype).removeprefix("torch.")) not in (reader.dtypes or {dtype}):
            wanted = ", ".join(sorted(reader.dtypes))
            problem = problem or f"computes in {dtype}, and the policy in {wanted}: start it with --dtype {wanted}"
        if problem is not None:
            self.shutdown()
            raise ValueError(f"vLLM's model {config.model} {problem}")

    def start_weight_update(self) -> None:
        """Nothing: a read may be repeated, and each starts from the beginning."""

    def receive_weights(self, update_info: PolicyUpdate) -> None:
        """Raises PolicyUnavailable if the job ended, ValueError for what vLLM would compute otherwise."""
        if update_info.adapter is not None:
            require_adaptable(self.vllm_config, self.model, update_info.adapter)
            if not self._has_base:
                raise ValueError("vLLM has another policy in the place of the base: start it again")
            return
        refuse_unpacked_experts(self.model_config)
        if self._reader is None:
            raise RuntimeError("there is no address of a policy yet: call init_weight_transfer_engine first")
        self._reader.read(self._load)

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._has_base = False
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


class ColocatedPolicy:
    """The policy in `llm`, vLLM in this process; always merged if not `takes_adapter`. `request`: of its adapter."""

    def __init__(self, llm: Any, *, takes_adapter: bool | None = None) -> None:
        self.request, self._llm, self._takes_adapter = None, llm, takes_adapter

    def sync(self, model: nn.Module) -> None:
        """Collective when it is first called; then each rank reads for itself."""
        if self._takes_adapter is None:
            load = partial(self._load_adapter, model)
            self._takes_adapter = takes_adapter(model, self._folder, load, merges_packed=True)
        elif self._takes_adapter:
            self._load_adapter(model)
        if self._takes_adapter:
            return
        self.request = None  # another rank's vLLM may not have taken it
        tensors, theirs = PretrainedTensors(model), self._llm.model_config
        if (problem := difference(theirs.hf_config.to_dict(), tensors.empty.config.to_dict())) is not None:
            raise GenerationFailed(f"vLLM's model {theirs.model} {problem}")
        refuse_unpacked_experts(theirs)
        # Layer by layer, as vLLM packs or quantises weights after it has loaded them.
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})

    def _load_adapter(self, model: nn.Module) -> None:
        lora_factors(model)  # raises if they are no longer all of the policy
        engine, former = self._llm.llm_engine, self.request
        number = former.lora_int_id + 1 if former else 1
        with adapter_folder(model) as folder:
            request = LoRARequest(f"odc-{number}", number, folder)
            engine.add_lora(request)
        self.request = request
        if former:
            engine.remove_lora(former.lora_int_id)

    def _folder(self, factors: dict[str, torch.Tensor]) -> str:
        self._llm.apply_model(partial(require_adaptable, self._llm.llm_engine.vllm_config, names=factors))
        return self._llm.model_config.model
