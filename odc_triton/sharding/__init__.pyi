from ..tools.memory.footprint import memory_plan as memory_plan
from .shard_module import fully_shard as fully_shard

__all__: list[str]
