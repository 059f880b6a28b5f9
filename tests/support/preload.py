"""What the fork server imports once, so that every rank of every test gets it for free."""

import matplotlib.figure  # noqa: F401
import peft  # noqa: F401

import odc_triton.engine.api
import odc_triton.nn.replace
import odc_triton.sharding.shard  # noqa: F401
