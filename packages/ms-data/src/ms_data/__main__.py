"""`python -m ms_data` runs the `ms-data` command."""

from ms_data.cli import main

raise SystemExit(main())
