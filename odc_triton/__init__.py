"""odc-triton: sharded training by on-demand communication. The public names, nothing else.

Names are resolved on first use, so that `import odc_triton` costs next to nothing over `import torch`.
"""

from .base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
__version__ = "0.4.0"
