"""`python -m ms_kernels` is the command `ms-kernels`."""

import sys

from ms_kernels.cli import main

sys.exit(main())
