"""`python -m ms_align` is the command `ms-align`."""

import sys

from ms_align.cli import main

sys.exit(main())
