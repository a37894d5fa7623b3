"""Events of a trace as typed msgspec records; fields not declared here are skipped when decoding.

Numbers are range-checked during decoding: a number that fits no column damages only its own event.
"""

from typing import Annotated, Final

from msgspec import Meta, Raw, Struct, field

DAMAGE: Final = (ValueError, RecursionError)
"""Errors of decoding text that is not JSON, not UTF-8, nested too deeply or out of bounds.

msgspec's errors and UnicodeDecodeError are subclasses of ValueError.
"""
MAX_NS: Final = 1 << 62
"""Limit on times before and after 1970, such that a difference of two times fits int64."""
MAX_US: Final = MAX_NS / 1000
EMPTY = Raw(b"")
Int = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
SmallInt = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
Instant = Annotated[float, Meta(ge=-MAX_US, le=MAX_US)]
Duration = Annotated[float, Meta(ge=0, le=MAX_US)]


class Arguments(Struct, frozen=True, gc=False):
    """Arguments of an event; absent fields keep their defaults."""

    external: Int = field(name="External id", default=-1)
    types: Raw = field(name="Input type", default=EMPTY)
    dims: Raw = field(name="Input Dims", default=EMPTY)
    correlation: Int = -1
    bytes_moved: Int = field(name="bytes", default=0)
    name: str = ""
    size_bytes: Int = field(name="Bytes", default=0)
    allocated_bytes: Int = field(name="Total Allocated", default=0)
    reserved_bytes: Int = field(name="Total Reserved", default=0)
    address: Int = field(name="Addr", default=-1)
    device_type: SmallInt = field(name="Device Type", default=-1)
    device_id: SmallInt = field(name="Device Id", default=-1)
    collective: str = field(name="Collective name", default="")
    sent_elements: Int = field(name="In msg nelems", default=0)
    received_elements: Int = field(name="Out msg nelems", default=0)
    group_size: SmallInt = field(name="Group size", default=0)
    dtype: str = ""
    group: str = field(name="Process Group Name", default="")
    group_ranks: Raw = field(name="Process Group Ranks", default=EMPTY)


NO_ARGUMENTS = Arguments()


class TraceEvent(Struct, frozen=True, gc=False):
    """One event of `traceEvents`; times in microseconds, as text in the Ascend profiler's files."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: Instant | str = 0.0
    dur: Duration | str = 0.0
    args: Arguments = NO_ARGUMENTS
