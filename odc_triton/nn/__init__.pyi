from .modules import Attention as Attention
from .modules import Embedding as Embedding
from .modules import Linear as Linear
from .modules import LMHead as LMHead

__all__: list[str]
