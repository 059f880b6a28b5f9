"""Operators on sharded parameters, inside autograd; each is a custom operator of torch, so `torch.compile` keeps it.

Each takes parameters as their module's forward sees them, sharded or not, as differentiable inputs. The gradient of a
sharded one is added directly to its owners, so autograd gets None for it.
"""

from .divergence import token_divergence as token_divergence
from .embedding import embedding as embedding
from .linear import linear as linear
from .log_probs import token_log_probs as token_log_probs
from .qkv import qkv as qkv
