"""What the fork server imports once, so that every rank of every test gets it for free."""
# ruff: noqa: F401

import contextlib
import gc
import os

import matplotlib.figure
import peft
import torch._functorch.partitioners  # with networkx, what Dynamo's backends begin by importing

import odc_triton.engine.api
import odc_triton.jobs.trainers.trainer
import odc_triton.nn.replace
import odc_triton.sharding.shard_module
import odc_triton.train.grpo
import odc_triton.train.sft
import tests.support.models
import tests.support.simulated
from tests.support import interpreter

with contextlib.suppress(ImportError):  # TRL needs a newer Python than we do
    import trl.trainer.grpo_trainer
    import trl.trainer.sft_trainer

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.patch_once()

# Ranks' collections then leave alone what is here: looking through it takes 0.3 s and copies its pages.
gc.collect()
gc.freeze()
