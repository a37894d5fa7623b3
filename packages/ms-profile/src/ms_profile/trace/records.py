"""One event as profilers write it, as typed records; what is not named here is never built."""

from msgspec import Raw, Struct, field

__all__ = ["NO_ARGUMENTS", "Arguments", "Record"]

EMPTY = Raw(b"")


class Arguments(Struct, frozen=True, gc=False):
    """What an event says beyond its time; absent fields keep their defaults."""

    external: int = field(name="External id", default=-1)
    types: Raw = field(name="Input type", default=EMPTY)
    dims: Raw = field(name="Input Dims", default=EMPTY)
    correlation: int = -1
    bytes_moved: int = field(name="bytes", default=0)
    name: str = ""
    size_bytes: int = field(name="Bytes", default=0)
    allocated_bytes: int = field(name="Total Allocated", default=0)
    reserved_bytes: int = field(name="Total Reserved", default=0)
    device_type: int = field(name="Device Type", default=-1)
    device_id: int = field(name="Device Id", default=-1)
    collective: str = field(name="Collective name", default="")
    sent_elements: int = field(name="In msg nelems", default=0)
    received_elements: int = field(name="Out msg nelems", default=0)
    group_size: int = field(name="Group size", default=0)
    dtype: str = ""
    group: str = field(name="Process Group Name", default="")
    group_ranks: Raw = field(name="Process Group Ranks", default=EMPTY)


NO_ARGUMENTS = Arguments()


class Record(Struct, frozen=True, gc=False):
    """One member of `traceEvents`; times in microseconds, the Ascend profiler's as text."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | str = 0.0
    dur: float | str = 0.0
    args: Arguments = NO_ARGUMENTS
