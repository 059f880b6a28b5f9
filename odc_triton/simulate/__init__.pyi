from ..tools.simulate.hardware import DEVICES as DEVICES
from ..tools.simulate.hardware import Links as Links
from ..tools.simulate.job import Job as Job
from ..tools.simulate.lanes import Outcome as Outcome
from ..tools.simulate.models import MODELS as MODELS
from ..tools.simulate.models import Model as Model
from ..tools.simulate.run import simulate as simulate
from ..tools.simulate.study import SETTINGS as SETTINGS
from ..tools.simulate.study import Row as Row
from ..tools.simulate.study import draw as draw
from ..tools.simulate.study import lengths_of_file as lengths_of_file
from ..tools.simulate.study import named_lengths as named_lengths
from ..tools.simulate.study import rank_settings as rank_settings

__all__: list[str]
