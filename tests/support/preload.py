"""What the fork server imports once, so that every rank of every test gets it for free."""

import contextlib

import matplotlib.figure  # noqa: F401
import peft  # noqa: F401

import odc_triton.engine.api
import odc_triton.hf.trainer
import odc_triton.nn.replace
import odc_triton.sharding.shard
import odc_triton.train.grpo
import odc_triton.train.sft  # noqa: F401

with contextlib.suppress(ImportError):  # TRL needs a newer Python than we do
    import trl.trainer.grpo_trainer
    import trl.trainer.sft_trainer  # noqa: F401
