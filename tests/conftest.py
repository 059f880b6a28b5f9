"""Decides, before anything imports triton, where kernels run: see bench/operators/place.py."""

from .kernels import place as place
