from ..packs.loss import predictions as predictions
from ..packs.reference import AdapterReference as AdapterReference
from ..packs.reference import Reference as Reference
from ..packs.reference import Teacher as Teacher
from ..sequence.sums import SampleSums as SampleSums
from ..step import Objective as Objective
from ..step import StepPart as StepPart
from ..step import StepReport as StepReport
from ..step import Sums as Sums
from ..step import Terms as Terms
from ..step import evaluate as evaluate
from ..step import run_step as run_step
from .cross_entropy import CrossEntropy as CrossEntropy
from .cross_entropy import Distillation as Distillation
from .dpo import DPO as DPO
from .orpo import ORPO as ORPO
from .pairs import PairObjective as PairObjective
from .reward import BradleyTerry as BradleyTerry

__all__: list[str]
