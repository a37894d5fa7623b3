"""Runs and judges Python that nobody has read.

A system call that is not in a short list is refused (`inside.syscalls`). No file is opened but for
reading beneath the interpreter's library and the system's. Time, memory, threads and output are
limited. A response and its tests are two processes: the first one gives values, the second one
compares them, and only its word is a verdict. `docs/align/rewards.md` says what is promised,
and what is not.
"""

from ms_align.rewards.sandbox.limits import Limits, Outcome
from ms_align.rewards.sandbox.run import judge, run_python

__all__ = ["Limits", "Outcome", "judge", "run_python"]
