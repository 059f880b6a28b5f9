"""A model of Qwen2.5-0.5B's shape on the CPU backend: how long `fully_shard` takes, what the ranks hold after a step.

    python -m bench.reports.large_model [--ranks 2] [--out FILE]

Random weights, created on the meta device; fp32. Memory is the proportional set size of all ranks' processes after one
optimizer step, less what they had before the model, compared with parameters, gradients and AdamW's states.
"""

from __future__ import annotations

import time

from odc_triton.comm.launch import launch

from ..provenance import about, options_of, save_json

TOKENS = 16


def one_step() -> dict[str, float]:
    """On one rank: seconds of `fully_shard`, bytes held after a step, parameters of the model."""
    import psutil
    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from odc_triton import fully_shard, minibatch
    from odc_triton.comm.local_store import rendezvous_url

    dist.init_process_group("gloo", rendezvous_url())
    before = psutil.Process().memory_full_info().pss
    sizes = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    begin_s = time.perf_counter()
    model = fully_shard(model, backend="cpu")
    seconds = time.perf_counter() - begin_s
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, sizes["vocab_size"], (1, TOKENS))
    with minibatch(model, tokens=TOKENS - 1) as mb:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss * (TOKENS - 1)
        (loss / mb.tokens).backward()
    optimizer.step()
    dist.barrier()
    held = psutil.Process().memory_full_info().pss - before
    dist.barrier()  # no rank's pages are freed while others are counted
    dist.destroy_process_group()
    return {"seconds": seconds, "held_bytes": held, "parameters": parameters}


def main() -> None:
    options = options_of(__doc__, ranks=2)
    of_ranks = launch(one_step, ranks=options.ranks)
    held, wanted = sum(of["held_bytes"] for of in of_ranks), 16 * of_ranks[0]["parameters"]
    seconds = max(of["seconds"] for of in of_ranks)
    print(
        f"{of_ranks[0]['parameters'] / 1e6:.0f} M parameters, {options.ranks} ranks: fully_shard took {seconds:.1f} s; "
        f"held after a step: {held / 1e9:.2f} GB, {held / wanted:.2f} of parameters, gradients and states"
    )
    if options.out:
        save_json(options.out, about() | {"ranks": of_ranks, "held_over_wanted": held / wanted})


if __name__ == "__main__":
    main()
