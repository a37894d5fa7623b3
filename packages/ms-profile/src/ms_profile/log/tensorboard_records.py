"""Write TensorBoard event files record by record, without TensorBoard.

The format is a few protocol buffer messages in checksummed records:
`Event {double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5;
SessionLog session_log = 7}`, `Summary {repeated Value value = 1}` and `Value {string tag = 1;
float simple_value = 2; TensorProto tensor = 8; SummaryMetadata metadata = 9}`.

Written by hand, because the package tensorboard requires a web server, grpcio and protobuf in the
environment of each training run, and its writer and tensorboardX's buffer records in a thread, so a
killed run would lose its last ones.
"""

import struct
from collections.abc import Mapping
from math import inf
from typing import Final

CASTAGNOLI: Final = 0x82F63B78  # reflected polynomial of CRC-32C
STRINGS: Final = b"\x08\x07\x12\x04\x12\x02\x08\x01"
"""TensorProto with dtype DT_STRING and shape (1,)."""
TEXT_PLUGIN: Final = b"\x0a\x06\x0a\x04text"
"""SummaryMetadata that selects the text plugin."""
SESSION_START: Final = b"\x08\x01"
"""SessionLog with status START."""


def file_start(wall_s: float) -> bytes:
    """Return the first record of a file, with a Unix time."""
    # Event: wall_time = 1, file_version = 3.
    return _record(_double(1, wall_s) + _bytes(3, b"brain.Event:2"))


def session_start(wall_s: float, step: int) -> bytes:
    """Return a record that hides values of earlier files from `step` on."""
    return _record(_head(wall_s, step) + _bytes(7, SESSION_START))  # Event.session_log = 7


def values(
    wall_s: float, step: int, scalars: Mapping[str, float], texts: Mapping[str, str] | None = None
) -> bytes:
    """Return a record with the values of one step, by tag.

    Args:
        wall_s: Unix time.
        step: step number.
        scalars: numbers, rounded to float32; larger ones become infinite.
        texts: texts, shown as Markdown.
    """
    parts = [
        # Summary.value = 1; in it, tag = 1 and simple_value = 2 (wire type 5, so key 0x15).
        _bytes(1, _bytes(1, tag.encode()) + b"\x15" + _single(value))
        for tag, value in scalars.items()
    ]
    for tag, text in (texts or {}).items():
        tensor = STRINGS + _bytes(8, text.encode("utf-8", "replace"))  # TensorProto.string_val = 8
        parts.append(
            # Summary.Value: tag = 1, tensor = 8, metadata = 9.
            _bytes(1, _bytes(1, tag.encode()) + _bytes(8, tensor) + _bytes(9, TEXT_PLUGIN))
        )
    return _record(_head(wall_s, step) + _bytes(5, b"".join(parts)))  # Event.summary = 5


def _head(wall_s: float, step: int) -> bytes:
    return _double(1, wall_s) + b"\x10" + _varint(step)  # wall_time = 1, step = 2 (a varint)


def _single(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:  # too large for float32
        return struct.pack("<f", inf if value > 0 else -inf)


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # a negative int64 as two's complement
    # Seven bits per byte, lowest first; the high bit says that more bytes follow.
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)  # wire type 1: 64 bits


def _bytes(number: int, content: bytes) -> bytes:
    # Wire type 2: length-delimited.
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _record(message: bytes) -> bytes:
    # TFRecord: length, masked CRC of the length, message, masked CRC of the message.
    length = struct.pack("<Q", len(message))
    checksums = struct.pack("<I", _masked_crc(length)), struct.pack("<I", _masked_crc(message))
    return length + checksums[0] + message + checksums[1]


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):  # one step per bit, as the remainder of the byte alone
            value = value >> 1 ^ (CASTAGNOLI if value & 1 else 0)
        table.append(value)
    return table


TABLE: Final = _crc_table()


def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C of `data`, rotated and offset as TFRecord requires."""
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ TABLE[(value ^ byte) & 0xFF]
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
