from .chained import ChainedOptimizer as ChainedOptimizer
from .muon import Muon as Muon

__all__: list[str]
