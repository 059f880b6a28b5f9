"""What the fork server imports once, so that every rank of every test has it for nothing."""

import matplotlib.figure  # noqa: F401
import peft  # noqa: F401

import odc_triton.api
import odc_triton.replace
import odc_triton.sharding  # noqa: F401
