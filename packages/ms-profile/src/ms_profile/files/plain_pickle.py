"""Read a pickle of plain containers without Python's unpickler, so no file can run code.

Only the opcodes for None, booleans, numbers, strings, lists, tuples and dicts are implemented. A
pickle that names a class or function, or uses any other opcode, is rejected. Each opcode creates at
most one object, so memory is proportional to the file size.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ms_profile.files.untrusted import read_bytes

LIMIT_BYTES: Final = 4 << 30
MAX_INT_BYTES: Final = 16
GLOBALS: Final = frozenset(b"c\x93Ri\x81\x92ob\x82\x83\x84PQ\x97\x98")
"""Opcodes that import, construct or call: GLOBAL, REDUCE, INST, NEWOBJ, BUILD, EXT1, PERSID, ..."""
_MARK: Final = object()


class _NotPlainError(ValueError):
    """The pickle has an opcode or operand that plain containers do not need."""


def read_plain_pickle(path: Path, *, error: type[Exception]) -> Any:
    """Return the object in a file written by `pickle.dump` (protocol 2 to 5).

    Args:
        path: file of at most 4 GiB.
        error: exception class to raise.

    Raises:
        error: the file is missing, truncated, not a pickle, or contains more than plain containers.
    """
    data = read_bytes(path, error=error, limit_bytes=LIMIT_BYTES)
    if data[:1] != b"\x80":
        raise error(f"{path} is not a pickle: its first bytes are {data[:8]!r}")
    try:
        return _load(data)
    except _NotPlainError as problem:
        raise error(f"{path} {problem}") from None
    # Operands beyond the end, an empty stack, an unhashable key: the file is damaged.
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, struct.error):
        raise error(f"{path} is a truncated or damaged pickle; write it again") from None


def _load(data: bytes) -> Any:
    """Run the opcodes of a pickle (see `pickletools` for their names)."""
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    append, pop = stack.append, stack.pop
    u16, u32, u64 = (struct.Struct(code).unpack_from for code in ("<H", "<I", "<Q"))
    i32, f64 = struct.Struct("<i").unpack_from, struct.Struct(">d").unpack_from
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        content = data[position : position + size]
        if len(content) != size:
            raise IndexError
        position += size
        return content

    def items_since_mark() -> list[Any]:
        # Search from the end, so that the cost is proportional to the number of items.
        start = len(stack)
        while stack[start - 1] is not _MARK:
            start -= 1
            if not start:
                raise IndexError
        items = stack[start:]
        del stack[start - 1 :]
        return items

    while True:
        code = data[position]
        position += 1
        if code == 0x68:  # BINGET
            append(memo[data[position]])
            position += 1
        elif code == 0x4B:  # BININT1
            append(data[position])
            position += 1
        elif code == 0x6A:  # LONG_BINGET
            append(memo[u32(data, position)[0]])
            position += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x8A:  # LONG1
            size = data[position]
            position += 1
            if size > MAX_INT_BYTES:
                raise _NotPlainError(f"has an integer of {size} bytes; 8 bytes are expected")
            append(int.from_bytes(take(size), "little", signed=True))
        elif code == 0x4A:  # BININT
            append(i32(data, position)[0])
            position += 4
        elif code == 0x4D:  # BININT2
            append(u16(data, position)[0])
            position += 2
        elif code == 0x7D:  # EMPTY_DICT
            append({})
        elif code == 0x28:  # MARK
            append(_MARK)
        elif code == 0x75:  # SETITEMS
            items = items_since_mark()
            _require(stack[-1], dict)
            keys = items[::2]
            # Strings only: hashing a deeply nested tuple would overflow the C stack.
            if not all(type(key) is str for key in keys):
                raise TypeError("keys must be strings")
            stack[-1].update(zip(keys, items[1::2], strict=True))
        elif code == 0x73:  # SETITEM
            value, key = pop(), pop()
            _require(stack[-1], dict)
            _require(key, str)
            stack[-1][key] = value
        elif code == 0x5D:  # EMPTY_LIST
            append([])
        elif code == 0x65:  # APPENDS
            items = items_since_mark()
            _require(stack[-1], list)
            stack[-1].extend(items)
        elif code == 0x61:  # APPEND
            value = pop()
            _require(stack[-1], list)
            stack[-1].append(value)
        elif code in (0x8C, 0x58, 0x8D):  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
            width, read = {0x8C: (1, None), 0x58: (4, u32), 0x8D: (8, u64)}[code]
            size = data[position] if read is None else read(data, position)[0]
            position += width
            append(take(size).decode("utf-8", "replace"))
        elif code in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            index = data[position] if code == 0x71 else u32(data, position)[0]
            position += 1 if code == 0x71 else 4
            memo[index] = stack[-1]
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            size = code - 0x84
            items = stack[-size:]
            if len(items) < size:
                raise IndexError
            del stack[-size:]
            append(tuple(items))
        elif code == 0x74:  # TUPLE
            append(tuple(items_since_mark()))
        elif code in _CONSTANTS:
            append(_CONSTANTS[code]())
        elif code == 0x47:  # BINFLOAT
            append(f64(data, position)[0])
            position += 8
        elif code == 0x95:  # FRAME: a hint for readers of streams
            position += 8
        elif code == 0x80:  # PROTO
            if data[position] > 5:
                raise _NotPlainError(f"has pickle protocol {data[position]}; 2 to 5 can be read")
            position += 1
        elif code == 0x2E:  # STOP
            value = pop()
            if stack or value is _MARK:
                raise IndexError
            return value
        elif code in GLOBALS:
            raise _NotPlainError(
                "contains a Python class or function, which is never loaded; only plain lists, "
                "dicts, numbers and strings are read, as torch.cuda.memory._dump_snapshot writes"
            )
        else:
            raise _NotPlainError(
                f"has opcode 0x{code:02x} at byte {position - 1}, which plain containers do not "
                "need; write the snapshot with torch.cuda.memory._dump_snapshot"
            )


_CONSTANTS: Final[dict[int, Callable[[], Any]]] = {
    0x4E: lambda: None,  # NONE
    0x88: lambda: True,  # NEWTRUE
    0x89: lambda: False,  # NEWFALSE
    0x29: tuple,  # EMPTY_TUPLE
}


def _require(value: object, expected: type) -> None:
    if type(value) is not expected:
        raise TypeError(f"expected a {expected.__name__}, got {type(value).__name__}")
