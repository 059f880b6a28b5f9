from .collate import PackedDataset as PackedDataset
from .collate import count_target_tokens as count_target_tokens
from .collate import pack_collate as pack_collate
from .collate import to_device as to_device
from .cost import CostModel as CostModel
from .counter import store_counter as store_counter
from .packing import best_fit_decreasing as best_fit_decreasing
from .packing import pack as pack
from .partition import balanced_partition as balanced_partition
from .partition import refine as refine
from .queue import QueuedPacks as QueuedPacks
from .queue import queue_packs as queue_packs
from .relatives import find_relatives as find_relatives
from .relatives import floor_of as floor_of
from .sampler import MinibatchSampler as MinibatchSampler
from .strategies import BALANCES as BALANCES
from .strategies import assign as assign
from .strategies import assign_one as assign_one
from .tower import TowerCost as TowerCost
from .tower import values_of as values_of

__all__: list[str]
