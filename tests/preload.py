"""What the fork server imports once, so that every rank of every test has it for nothing."""

import torch.distributed.checkpoint.state_dict  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

import odc_triton.api
import odc_triton.sharding  # noqa: F401
