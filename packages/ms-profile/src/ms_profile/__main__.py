"""`python -m ms_profile`, which is how torchrun starts `ms-profile run`."""

import sys

from ms_profile.cli import main

sys.exit(main())
