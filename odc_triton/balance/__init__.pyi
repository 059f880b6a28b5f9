from ..packs.collate import PackedDataset as PackedDataset
from ..packs.collate import count_target_tokens as count_target_tokens
from ..packs.collate import pack_collate as pack_collate
from ..packs.collate import to_device as to_device
from ..plan.cost import CostModel as CostModel
from ..plan.counter import store_counter as store_counter
from ..plan.entries import Segment as Segment
from ..plan.fields import values_of as values_of
from ..plan.packing import best_fit_decreasing as best_fit_decreasing
from ..plan.packing import pack as pack
from ..plan.partition import balanced_partition as balanced_partition
from ..plan.partition import refine as refine
from ..plan.plan import Plan as Plan
from ..plan.planner import assign as assign
from ..plan.planner import assign_one as assign_one
from ..plan.planner import make_plan as make_plan
from ..plan.queue import QueuedPacks as QueuedPacks
from ..plan.queue import queue_packs as queue_packs
from ..plan.relatives import find_relatives as find_relatives
from ..plan.relatives import floor_of as floor_of
from ..plan.sampler import MinibatchSampler as MinibatchSampler
from ..plan.samples import Limits as Limits
from ..plan.samples import Samples as Samples
from ..plan.strategies import BALANCES as BALANCES
from ..plan.tower import TowerCost as TowerCost

__all__: list[str]
