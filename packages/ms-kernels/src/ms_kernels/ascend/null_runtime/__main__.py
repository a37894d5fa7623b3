"""Run a script on the null runtime: `python -m ms_kernels.ascend.null_runtime train.py`."""

import sys

from ms_kernels.ascend.null_runtime.cli import main

sys.exit(main())
