"""`python -m odc_triton.tools.cli`."""

import sys

from . import main

sys.exit(main())
