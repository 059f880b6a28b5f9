"""Until vLLM in a rank's process has a LoRA policy: the adapter alone, and merged into its base.

`python -m bench.suites.adapter_sync [--out FILE]`, by out/vllm/bin/python, which has vLLM itself.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from ..provenance import RESULTS, about, options_of, save_json

SIZES = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12}
SIZES |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 512}
RANK = 16
_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
_ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517", "WORLD_SIZE": "1"}


def measure(folder: Path, alone: bool, syncs: int) -> dict[str, Any]:
    """One rank that trains and samples; the first sync, which compares or reads the base, is apart."""
    from peft import LoraConfig, get_peft_model

    from odc_triton import fully_shard
    from odc_triton.checkpoint.adapter import lora_factors
    from odc_triton.checkpoint.pretrained_tensors import PretrainedTensors
    from odc_triton.jobs.rl.vllm_colocate import VllmColocate

    torch.manual_seed(0)
    config = LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)
    model = fully_shard(get_peft_model(Qwen3ForCausalLM.from_pretrained(folder), config))
    engine = VllmColocate(folder, rank=0, dtype="float32", max_tokens=128, lora_rank=RANK if alone else 0)
    seconds = []
    for _ in range(1 + syncs):
        start_s = time.perf_counter()
        engine.sync(model)
        seconds.append(time.perf_counter() - start_s)
    assert (engine._policy.request is not None) is alone
    sent = lora_factors(model)[1] if alone else dict(PretrainedTensors(model))
    megabytes = sum(each.numel() * each.element_size() for each in sent.values()) / 1e6
    engine.close()
    found = {"megabytes": megabytes, "first_s": seconds[0], "median_s": statistics.median(seconds[1:])}
    return found | {"seconds": seconds[1:]}


def _child(folder: Path, alone: bool, syncs: int, found: Any) -> None:
    os.environ.update(_ENVIRONMENT | {"RANK": "0", "LOCAL_RANK": "0"})
    dist.init_process_group("gloo")
    found.put(measure(folder, alone, syncs))


def main() -> None:
    options = options_of(__doc__ or "", syncs=9)
    spawn = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).save_pretrained(folder)
        result: dict[str, Any] = {**about(), "sizes": SIZES, "rank": RANK}
        for name, alone in (("merged", False), ("alone", True)):
            queue = spawn.Queue()
            process = spawn.Process(target=_child, args=(Path(folder), alone, options.syncs, queue))
            process.start()
            result[name] = queue.get(timeout=600)
            process.join()
    save_json(options.out or RESULTS / "adapter_sync.json", result)


if __name__ == "__main__":
    main()
