"""Events as TensorBoard's own files, written without TensorBoard.

Three messages of protocol buffers in checksummed records are all the format takes for scalars:
`Event {double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5}`,
`Summary {repeated Value value = 1}` and `Value {string tag = 1; float simple_value = 2}`.
"""

import struct
from collections.abc import Iterable
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import BinaryIO, Final

from ms_profile.errors import RecordError
from ms_profile.files.untrusted import check_path
from ms_profile.log.event_log import Event
from ms_profile.log.manifest import whole_file

CASTAGNOLI: Final = 0x82F63B78


def export_tensorboard(events: Iterable[Event], folder: Path | str) -> int:
    """Write every number of every event with a step as the scalar `kind/field`, a run a rank.

    Args:
        events: as `read_events` yields them.
        folder: TensorBoard's log folder; the files go to `rank-00000/` and so on below it, each of
            which appears whole once all events are written.

    Returns:
        How many scalars were written.

    Raises:
        RecordError: no system takes the path, or something else stands there.
        OSError: the folder cannot be written.
    """
    check_path("folder", folder, error=RecordError, written="folder")
    files: dict[int, BinaryIO] = {}
    written = 0
    with ExitStack() as open_files:
        for event in events:
            if event.step is None:
                continue
            if event.rank not in files:
                name = f"events.out.tfevents.{event.wall_ns // 1_000_000_000}.ms-profile"
                path = Path(folder) / f"rank-{event.rank:05d}" / name
                file = files[event.rank] = open_files.enter_context(whole_file(path))
                file.write(_record(_double(1, event.wall_ns / 1e9) + _bytes(3, b"brain.Event:2")))
            message, scalars = _message(event)
            if scalars:
                files[event.rank].write(_record(message))
                written += scalars
    return written


def _message(event: Event) -> tuple[bytes, int]:
    """The message of an event, and how many scalars it carries."""
    values = [
        _bytes(1, _bytes(1, f"{event.kind}/{name}".encode()) + b"\x15" + _single(value))
        for name, value in event.fields.items()
        if name != "step" and isinstance(value, int | float)
    ]
    step = _varint(event.step or 0)
    head = _double(1, event.wall_ns / 1e9) + b"\x10" + step
    return head + _bytes(5, b"".join(values)), len(values)


def _single(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # more than a single holds
        return struct.pack("<f", inf if value > 0 else -inf)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def _bytes(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _record(message: bytes) -> bytes:
    length = struct.pack("<Q", len(message))
    checks = struct.pack("<I", _masked_crc(length)), struct.pack("<I", _masked_crc(message))
    return length + checks[0] + message + checks[1]


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return table


TABLE: Final = _crc_table()


def _masked_crc(data: bytes) -> int:
    """CRC-32C, rotated and offset as TFRecord asks."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[(value ^ byte) & 0xFF]
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
