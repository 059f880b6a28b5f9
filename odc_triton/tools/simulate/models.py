"""The simulator's models, from transformers' models on meta: transfers, work and memory.

Memory is `memory_plan`'s: bf16 compute, fp32 masters, gradients and AdamW states.

[Note: rows of experts] The experts of a block are one tensor per matrix, sharded by rows, and a row is a whole expert.
So 8 experts over 16 GPUs are on 8 of them: the fullest has 1/8, not 1/16. It also serves that much more to its peers,
and FSDP2, which pads the others' shards to its size, sends equally much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base.errors import in_a_line
from ...comm.layout import ParameterSpec, find_units, rows_per_rank
from ...plan.cost import CostModel
from ...plan.decoder import CHOSEN_COUNTS, Decoder, expert_count, is_hybrid
from ...plan.sizes import size_of

if TYPE_CHECKING:
    from torch import nn

    from ..memory.footprint import MemoryPlan


def _dense(family: str, h: int, layers: int, heads: int, kv_heads: int, mlp: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": family,
        "hidden_size": h,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


_OSS = _dense("gpt_oss", 2880, 24, 64, 8, 2880, 201088, False) | {"head_dim": 64, "num_experts_per_tok": 4}
# Configs as published; missing fields have the defaults of their family.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _dense("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": _dense("qwen2", 1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-3b": _dense("qwen2", 2048, 36, 16, 2, 11008, 151936, True),
    "qwen2.5-7b": _dense("qwen2", 3584, 28, 28, 4, 18944, 152064, False),
    "qwen2.5-14b": _dense("qwen2", 5120, 48, 40, 8, 13824, 152064, False),
    "qwen2.5-32b": _dense("qwen2", 5120, 64, 40, 8, 27648, 152064, False),
    "llama-3.1-8b": _dense("llama", 4096, 32, 32, 8, 14336, 128256, False),
    "llama-3.3-70b": _dense("llama", 8192, 80, 64, 8, 28672, 128256, False),
    "mixtral-8x7b": _dense("mixtral", 4096, 32, 32, 8, 14336, 32000, False)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3-30b-a3b": _dense("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, False)
    | {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "gpt-oss-20b": _OSS | {"num_local_experts": 32},
    "gpt-oss-120b": _OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-v3": _dense("deepseek_v3", 7168, 61, 128, 128, 18432, 129280, False)
    | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8}
    | {"first_k_dense_replace": 3},
}
_SCHEMES = {"odc": "odc", "fsdp": "fsdp2", "fsdp-no-reshard": "fsdp2_no_reshard"}  # of `memory_plan`, by schedule


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the simulator knows of a model: sizes, and FLOPs.

    name: for tables.
    module: on meta, or real.
    cost: in FLOPs of forward and backward without recomputation.
    is_frozen: but for adapters.
    idle_parameters: those of experts that a token is not routed to.
    kv_width: elements of its keys and values in all blocks.
    logits_bytes: per token, in bf16, and their log-probabilities in fp32.
    """

    name: str
    module: nn.Module
    cost: CostModel
    is_frozen: bool = False
    idle_parameters: int = 0
    kv_width: int = 0
    logits_bytes: int = 0

    @cached_property
    def _units(self) -> dict[str, list[ParameterSpec]]:
        """Parameters by unit, the root's first."""
        return _specs_by_unit(self.module)

    @property
    def layers(self) -> int:
        return len(self._units) - 1

    @property
    def parameters(self) -> int:
        return sum(map(_elements, self._units.values()))

    @property
    def active_parameters(self) -> int:
        """The number of those that one token is multiplied with."""
        return self.parameters - self.idle_parameters

    def with_adapters(self, rank: int) -> Model:
        """Of `rank` on all linear layers, by PEFT; the rest is a frozen base in bf16, with no products for gradients of
        weights. Products of adapters are left out. The module is changed.
        """
        import torch

        from ...jobs.train.model import add_adapters

        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        return replace(
            self,
            module=add_adapters(self.module, rank=rank, alpha=None, targets="all-linear"),
            cost=replace(self.cost, linear=self.cost.linear * 2 / 3, head=self.cost.head * 2 / 3),
            is_frozen=True,
        )

    def sent(self, shards: int, *, trained: bool = False) -> list[int]:
        """For the root and each block, `shards` times the fullest shard: a transfer of so many parameters in equal
        shards takes as long. Experts are sharded by rows, and a row is a whole expert: so shards may be unequal.

        trained: of parameters that are trained only.
        """
        units = [[each for each in specs if each.reduce_dtype or not trained] for specs in self._units.values()]
        return [
            sum(shards * rows_per_rank(spec.shape[0], shards) * math.prod(spec.shape[1:]) for spec in specs)
            for specs in units
        ]

    def memory(self, schedule: str, *, shards: int, ranks: int, checkpointing: bool, alone: bool = False) -> MemoryPlan:
        """The fullest GPU's memory; per token only if the activations of the model's kind are known.

        schedule: "fsdp", "fsdp-no-reshard" or "odc".
        shards: GPUs that together hold one copy of the parameters (all `ranks`, unless each node holds a copy).
        ranks: over which ODC shards masters and optimizer states in any case; FSDP2 keeps them with the shards.
        checkpointing: of activations.
        alone: a GPU has all that trains, and its shard of the rest.
        """
        import torch
        from torch.distributed.fsdp import MixedPrecisionPolicy

        from ..memory.footprint import memory_plan

        return memory_plan(
            self.module,
            shards,
            replicas=ranks // shards if schedule == "odc" and not alone else 1,
            run_ranks=1 if alone else None,
            scheme=_SCHEMES[schedule],
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            backend="cuda",
            gradient_checkpointing=checkpointing,
        )

    @classmethod
    def of(cls, model: nn.Module, *, name: str) -> Model:
        """Of a causal LM of transformers, which may be on the meta device. FLOPs are those of `CostModel.from_config`,
        by the model's own weights; a hybrid's by its config. `name`: for tables.
        """
        config, (_, *blocks) = model.config.get_text_config(), _specs_by_unit(model).values()
        experts = expert_count(config)
        chosen = size_of(config, *CHOSEN_COUNTS, default=1) if experts else 1
        mixed = [
            spec
            for specs in blocks
            for spec in specs
            if experts and spec.shape[0] == experts and (len(spec.shape) > 2 or ".experts." in spec.name)
        ]
        idle = _elements(mixed) // experts * (experts - chosen) if mixed else 0
        decoder = Decoder.of(config) if getattr(config, "num_attention_heads", None) else None
        widths = 0 if decoder is None else decoder.key_width + decoder.value_width
        attention = 0 if decoder is None else decoder.heads * widths * decoder.attending
        working = sum(map(_elements, blocks)) - idle + config.hidden_size * config.vocab_size
        cost = CostModel(quadratic=3 * attention, linear=6 * working)
        return cls(
            name=name,
            module=model,
            cost=CostModel.from_config(config) if decoder and is_hybrid(config) else cost,
            idle_parameters=idle,
            kv_width=0 if decoder is None else decoder.kv_heads * widths * decoder.attending,
            logits_bytes=config.vocab_size * (2 + 4),
        )

    @classmethod
    def find(cls, name: str) -> Model:
        """One of `MODELS`, a config.json, or a folder with one; of a model of several parts its text decoder.

        Raises ValueError for an unknown name, and for the config of a model that can't be trained, on packs or at all.
        """
        import torch
        from transformers import AutoConfig

        from ...checkpoint import meta_causal_lm
        from ...checkpoint.adapted import read_config
        from ...packs.attention import PackingUnsupported
        from ...packs.enable import enable_packing

        source = name
        if name.lower() in MODELS:
            name = name.lower()
            config, path = AutoConfig.for_model(**MODELS[name]), None
        else:
            path = Path(name)
            path = path / "config.json" if path.is_dir() else path
            is_hub_id = path.suffix != ".json" and name.count("/") == 1 and not path.parent.exists()
            if not (path.is_file() or is_hub_id):
                raise ValueError(
                    f"model {name!r} is neither known nor there: give one of {', '.join(MODELS)}, a folder of "
                    f"transformers, a hub id (OWNER/NAME), or --init CONFIG"
                )
            config, name = read_config(str(path)), name if is_hub_id else path.parent.name or name
        try:
            if path is not None:
                enable_packing(meta_causal_lm(init=str(path)))  # as training does: what it refuses has no step
            with torch.device("meta"):
                model = _decoder(config)
            return cls.of(model, name=name)
        except (ValueError, TypeError, AttributeError, KeyError, PackingUnsupported) as error:
            raise ValueError(f"{source} can't be simulated: {in_a_line(error)}") from error


def _decoder(config: Any) -> nn.Module:
    """The text decoder of a model with this config, with random weights."""
    from torch import nn
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    text = config.get_text_config()
    if text is config or type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(text, trust_remote_code=False)
    model = AutoModelForImageTextToText.from_config(config, trust_remote_code=False)  # as of Qwen-VL
    model.set_encoder(nn.Identity(), modality="image")
    return model


def _specs_by_unit(module: nn.Module) -> dict[str, list[ParameterSpec]]:
    from ...sharding.collect import find_parameters, spec_of

    units = find_units(module)
    found: dict[str, list[ParameterSpec]] = {name: [] for name in ("", *units)}
    for entry in find_parameters(module, units, set()):
        spec = spec_of(entry, None)
        found[spec.unit].append(spec)
    return found


def _elements(specs: Iterable[ParameterSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in specs)
