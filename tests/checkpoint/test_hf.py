"""A sharded transformers model out into a folder that plain transformers loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import ranks


def _deepseek() -> torch.nn.Module:
    """It has persistent buffers beside its parameters."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "first_k_dense_replace": 1}
    ranks_of = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, **ranks_of, **experts)).eval()


def _tied() -> torch.nn.Module:
    from tests.support.models import build

    return build("gpt2-tied").eval()


BUILD = {"buffers": _deepseek, "tied": _tied}


def _saved(rank: int, world: int, name: str, folder: Path) -> torch.Tensor:
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    from odc_triton import fully_shard
    from odc_triton.checkpoint import save_pretrained

    model = fully_shard(BUILD[name]())
    if rank == 0:
        save_pretrained(model, folder)
    else:
        with pytest.raises(RuntimeError, match="rank 0 only"):
            save_pretrained(model, folder)
    with pytest.raises(
        RuntimeError, match=r"odc_triton\.checkpoint\.save_pretrained\(model, folder, tokenizer\) on rank 0"
    ):
        model.save_pretrained(folder / "own")
    with pytest.raises(NotImplementedError, match="call it before fully_shard"):
        model.resize_token_embeddings(300)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(folder / "own", state_dict=state)
    dist.barrier()
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits


@pytest.mark.parametrize("name", BUILD)
def test_plain_transformers_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    outcomes = ranks.run(_saved, 2, name, tmp_path)
    for folder in (tmp_path, tmp_path / "own"):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(model) is type(BUILD[name]())
        assert model.config.architectures == [type(model).__name__]
        with torch.no_grad():
            want = model(input_ids=torch.arange(3, 12)[None], use_cache=False).logits
        for logits in outcomes:
            torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-6)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    from odc_triton.checkpoint import save_pretrained

    with pytest.raises(TypeError, match="not a sharded transformers model"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
