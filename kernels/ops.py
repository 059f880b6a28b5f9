"""The operators, for use without the engine: docs/kernels_alone.md."""

from .embedding import embedding, embedding_grad
from .experts import Gate, grouped_linear, grouped_linear_dx
from .experts_wgrad import grouped_wgrad
from .gather import gather
from .linear import linear, linear_dx
from .linear_cross_entropy import HeadOutput, linear_cross_entropy, linear_cross_entropy_grad
from .linear_divergence import DivergenceOutput, HeadInput, linear_divergence, linear_divergence_grad
from .linear_staged import linear_dx_staged, linear_staged
from .peers import ALL, PeerShards
from .qkv import qkv
from .qkv_grad import QkvGradients, qkv_grad
from .qkv_inputs import QkNorm, QkvWeights, Rope
from .scatter import scatter
from .staged import StagedWeight, check, pull
from .tiles import EmbeddingGradTile, EmbeddingTile, LinearTile, QkvTile, SoftmaxTile, WgradTile
from .wgrad import wgrad

__all__ = [
    "ALL",
    "DivergenceOutput",
    "EmbeddingGradTile",
    "EmbeddingTile",
    "Gate",
    "HeadInput",
    "HeadOutput",
    "LinearTile",
    "PeerShards",
    "QkNorm",
    "QkvGradients",
    "QkvTile",
    "QkvWeights",
    "Rope",
    "SoftmaxTile",
    "StagedWeight",
    "WgradTile",
    "check",
    "embedding",
    "embedding_grad",
    "gather",
    "grouped_linear",
    "grouped_linear_dx",
    "grouped_wgrad",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_grad",
    "linear_divergence",
    "linear_divergence_grad",
    "linear_dx",
    "linear_dx_staged",
    "linear_staged",
    "pull",
    "qkv",
    "qkv_grad",
    "scatter",
    "wgrad",
]
