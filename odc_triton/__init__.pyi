from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy

from .base.errors import CheckpointCorrupt as CheckpointCorrupt
from .base.errors import CheckpointDiffers as CheckpointDiffers
from .base.errors import CheckpointFailed as CheckpointFailed
from .base.errors import DeadlineExceeded as DeadlineExceeded
from .base.errors import MinibatchFailed as MinibatchFailed
from .base.errors import MinibatchToRepeat as MinibatchToRepeat
from .base.errors import OdcError as OdcError
from .base.errors import PeerFailed as PeerFailed
from .base.errors import PolicyUnavailable as PolicyUnavailable
from .base.errors import RankLost as RankLost
from .base.errors import RanksDiffer as RanksDiffer
from .base.errors import RolloutFailed as RolloutFailed
from .checkpoint.repeat import repeating as repeating
from .engine.api import full_parameters as full_parameters
from .engine.api import publish as publish
from .engine.api import register_fsdp_forward_method as register_fsdp_forward_method
from .engine.minibatch import begin_minibatch as begin_minibatch
from .engine.minibatch import end_minibatch as end_minibatch
from .engine.minibatch import minibatch as minibatch
from .engine.serving import serving as serving
from .fsdp2.bridge import use_odc as use_odc
from .jobs.reports.fsdp2_record import record_timeline as record_timeline
from .nn.head import FusedLogits as FusedLogits
from .nn.head import TokenLogProbs as TokenLogProbs
from .nn.head import divergence as divergence
from .nn.head import log_probs as log_probs
from .nn.replace import Replaced as Replaced
from .nn.replace import replace_layers as replace_layers
from .nn.verification import Verified as Verified
from .nn.verification import verify as verify
from .policy.offer import PolicyOffer as PolicyOffer
from .policy.offer import offer_policy as offer_policy
from .policy.reader import PolicyReader as PolicyReader
from .policy.reader import read_policy as read_policy
from .sequence.enable import enable_split as enable_split
from .sequence.enable import split_forward as split_forward
from .sharding.agree import own_mesh as own_mesh
from .sharding.shard_module import fully_shard as fully_shard
from .tools.memory.footprint import MemoryPlan as MemoryPlan
from .tools.memory.footprint import memory_plan as memory_plan

__all__: list[str]
__version__: str
