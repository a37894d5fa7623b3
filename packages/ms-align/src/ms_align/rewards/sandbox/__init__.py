"""Sandbox that runs and judges untrusted Python code.

System calls that are not on a short allowlist fail (`inside.syscalls`). Files can only be opened
for reading, and only below the interpreter's library and the system libraries. Time, memory,
threads and output are limited. A response and its tests run in two processes: the first provides
values, the second compares them, and only the second returns the verdict. `docs/align/rewards.md`
lists the guarantees and their limits.
"""

from ms_align.rewards.sandbox.limits import Limits, Outcome
from ms_align.rewards.sandbox.run import judge, run_python

__all__ = ["Limits", "Outcome", "judge", "run_python"]
