"""`python -m ms_data`: the same as the command `ms-data`."""

from ms_data.cli import main

raise SystemExit(main())
