"""Names that a vendor's profiler, driver and communication library write into traces.

All except the labels are regular expressions, matched at the start of a name.
"""

from collections.abc import Mapping

from attrs import field, frozen

from ms_profile.vendors.category import Category


@frozen(kw_only=True)
class Vendor:
    """Names of one vendor; an empty field means the vendor has no such name."""

    labels: Mapping[str, Category] = field(factory=dict)
    """Category for each value of an event's `cat`."""
    processes: Mapping[str, Category] = field(factory=dict)
    """Category of unlabeled events by a pattern of "process/thread"; the first match counts."""
    host_backend: str = ""
    """Process group backends whose collectives run on a host thread."""
    device_backend: str = ""
    """Process group backends whose collectives are kernels launched by the host."""
    collective_kernel: str = ""
    """Kernels that communicate."""
    copy_kernel: str = ""
    """Unlabeled device events that copy."""
    wait_kernel: str = ""
    """Device events in which a stream waits."""
    communication_operator: str = ""
    """Host operators that only launch communication."""
    synchronizing_call: str = ""
    """Calls in which the host waits for the device."""
    allocation_call: str = ""
    """Calls that allocate or free memory through the driver."""
    trace_files: tuple[str, ...] = ()
    """Globs for trace files in the profiler's output folder; the first with a match is used."""
    database_tables: tuple[str, ...] = ()
    """Table names that identify the profiler's SQLite databases; one is enough."""
    database_reader: str = ""
    """Module whose `records` yields the events of these databases."""
