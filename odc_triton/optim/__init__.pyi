from .adamw8bit import AdamW8bit as AdamW8bit
from .chained import ChainedOptimizer as ChainedOptimizer
from .muon import Muon as Muon

__all__: list[str]
