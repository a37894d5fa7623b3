"""One event as profilers write it, as typed records; what is not named here is never built.

Numbers are bounded as they are decoded: one that no column holds damages its event alone.
"""

from typing import Annotated, Final

from msgspec import Meta, Raw, Struct, field

DAMAGE: Final = (ValueError, RecursionError)
"""What decoding raises over text that is not JSON, not UTF-8, nested too deeply or out of bounds.

msgspec's errors and UnicodeDecodeError are ValueErrors.
"""
MOST_NS: Final = 1 << 62
"""Instants lie within it, on either side of 1970; twice as much is still an int64."""
MOST_US: Final = MOST_NS / 1000
EMPTY = Raw(b"")
Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
Small = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Instant = Annotated[float, Meta(ge=-MOST_US, le=MOST_US)]
Length = Annotated[float, Meta(ge=0, le=MOST_US)]


class Arguments(Struct, frozen=True, gc=False):
    """What an event holds beyond its time; absent fields keep their defaults."""

    external: Whole = field(name="External id", default=-1)
    types: Raw = field(name="Input type", default=EMPTY)
    dims: Raw = field(name="Input Dims", default=EMPTY)
    correlation: Whole = -1
    bytes_moved: Whole = field(name="bytes", default=0)
    name: str = ""
    size_bytes: Whole = field(name="Bytes", default=0)
    allocated_bytes: Whole = field(name="Total Allocated", default=0)
    reserved_bytes: Whole = field(name="Total Reserved", default=0)
    device_type: Small = field(name="Device Type", default=-1)
    device_id: Small = field(name="Device Id", default=-1)
    collective: str = field(name="Collective name", default="")
    sent_elements: Whole = field(name="In msg nelems", default=0)
    received_elements: Whole = field(name="Out msg nelems", default=0)
    group_size: Small = field(name="Group size", default=0)
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
    ts: Instant | str = 0.0
    dur: Length | str = 0.0
    args: Arguments = NO_ARGUMENTS
