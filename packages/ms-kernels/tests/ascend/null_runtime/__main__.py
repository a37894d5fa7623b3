"""Run a script on the null runtime: `python -m null_runtime train.py`."""

import sys

from .cli import main

sys.exit(main())
