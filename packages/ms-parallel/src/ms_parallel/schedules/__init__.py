"""Pipeline schedules as values: generated, verified before a process starts, read and written.

Pure: nothing here imports torch or starts anything.
"""

from ms_parallel.schedules.action import Action, Kind
from ms_parallel.schedules.communication import with_communication
from ms_parallel.schedules.gpipe import gpipe
from ms_parallel.schedules.one_f_one_b import one_f_one_b
from ms_parallel.schedules.table import Schedule
from ms_parallel.schedules.verify import Report, verify

__all__ = [
    "Action",
    "Kind",
    "Report",
    "Schedule",
    "gpipe",
    "one_f_one_b",
    "verify",
    "with_communication",
]
