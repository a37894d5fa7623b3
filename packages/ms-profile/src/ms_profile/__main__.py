"""`python -m ms_profile`: the entry point that torchrun uses for `ms-profile run`."""

import sys

from ms_profile.cli import main

sys.exit(main())
