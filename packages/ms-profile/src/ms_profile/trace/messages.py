"""Message of a collective as the profiler recorded it: elements, dtype, process group."""

import re
from math import prod
from typing import Final

import msgspec

from ms_profile.trace.columns import CollectiveMessage
from ms_profile.trace.records import DAMAGE, Arguments

ELEMENT_BYTES: Final = {
    **dict.fromkeys(("double", "long", "long int", "float64", "int64"), 8),
    **dict.fromkeys(("float", "int", "float32", "int32"), 4),
    **dict.fromkeys(("half", "c10::half", "c10::bfloat16", "bfloat16", "float16", "short"), 2),
    **dict.fromkeys(("bool", "byte", "char", "unsigned char", "uint8", "int8"), 1),
}
MAX_ELEMENTS: Final = 1 << 58  # at 8 bytes per element, the size still fits int64
RANK: Final = re.compile(r"\s*-?[0-9]{1,8}\s*")


def message_of(arguments: Arguments) -> CollectiveMessage:
    """Copy a collective's message, as `arguments` keeps the text of its whole chunk alive."""
    return CollectiveMessage(
        kind=arguments.collective, sent_elements=arguments.sent_elements,
        received_elements=arguments.received_elements, dtype=arguments.dtype,
        group=arguments.group, group_size=arguments.group_size,
        ranks=_numbers(bytes(arguments.group_ranks)),
    )  # fmt: skip


def element_bytes(dtype: str) -> int | None:
    """Return the element size in bytes of a profiler's dtype name; None if unknown."""
    return ELEMENT_BYTES.get(dtype.lower())


def first_message(dims: bytes, types: bytes) -> tuple[int, str]:
    """Return elements and dtype of a gloo collective's inputs; (0, "") if not recorded."""
    try:
        shapes = msgspec.json.decode(dims) if dims else []
        dtypes = msgspec.json.decode(types) if types else []
    except DAMAGE:
        return 0, ""
    if not isinstance(shapes, list) or not isinstance(dtypes, list):
        return 0, ""
    # One shape per input; [] for scalars and other values. A list of tensors nests one level
    # deeper and is not counted.
    sides = [shape for shape in shapes if isinstance(shape, list) and shape]
    total = sum(prod(shape) for shape in sides if all(isinstance(side, int) for side in shape))
    if not 0 < total < MAX_ELEMENTS:
        return 0, ""
    return total, str(dtypes[0]) if dtypes else ""


def _numbers(text: bytes) -> tuple[int, ...]:
    """Parse ranks from a list that Kineto may write as text; () if Kineto shortened it."""
    if b"..." in text:
        return ()
    pieces = text.decode(errors="replace").strip('"[] ').split(",")
    return tuple(int(piece) for piece in pieces if RANK.fullmatch(piece))
