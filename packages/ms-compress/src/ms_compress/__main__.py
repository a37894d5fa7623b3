"""`python -m ms_compress` runs the command `ms-compress`."""

import sys

from ms_compress.cli import main

sys.exit(main())
