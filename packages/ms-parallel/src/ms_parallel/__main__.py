"""`python -m ms_parallel`."""

import sys

from ms_parallel.cli import main

sys.exit(main())
