from .hardware import DEVICES as DEVICES
from .hardware import Links as Links
from .job import Job as Job
from .lanes import Outcome as Outcome
from .models import MODELS as MODELS
from .models import Model as Model
from .run import simulate as simulate
from .study import SETTINGS as SETTINGS
from .study import draw as draw
from .study import lengths_of_file as lengths_of_file
from .study import named_lengths as named_lengths
from .study import rank_settings as rank_settings

__all__: list[str]
