"""`python -m odc_triton.cli`."""

import sys

from . import main

sys.exit(main())
