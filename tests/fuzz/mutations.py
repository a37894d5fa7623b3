"""Ways to damage a file; each is a pure function of its bytes and a random generator."""

import gzip
import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["PLACES", "mutate"]

Mutation = Callable[[bytes, random.Random], bytes]
MANY = 100_000

HUGE = ("1e999", "-1e999", "9" * 400, "9" * 5000, "4294967296", "9223372036854775808", "-1", "NaN")
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63, 10**400, 1e308, 1.5, "", "\0", "\ud800"),
    *("x" * 1_000_000, "../" * 2000, "/dev/null", "%s", "1", [], {}, [[]], [None], {"": None}),
)
TOML_VALUES = (
    *("true", "-1", "0", "1.5", "inf", "nan", "1e999", "9" * 400, "9223372036854775808", '""'),
    *(r'"\u0000"', '"' + "x" * 1_000_000 + '"', '"../x"', "[]", "[[1]]", "{}", "{ a = 1 }"),
    *("1979-05-27", "[" * 5000 + "]" * 5000, "'" + "../" * 2000 + "'", "4294967296"),
)


def flip_a_bit(data: bytes, rng: random.Random) -> bytes:
    """One bit."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    """Several bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(2, 16)):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Nothing after some byte."""
    return data[: rng.randrange(len(data))]


def delete(data: bytes, rng: random.Random) -> bytes:
    """A stretch is missing."""
    start, end = _stretch(data, rng)
    return data[:start] + data[end:]


def duplicate(data: bytes, rng: random.Random) -> bytes:
    """A stretch stands twice."""
    start, end = _stretch(data, rng)
    return data[:end] + data[start:]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Two stretches have changed places."""
    one, two = sorted(_stretch(data, rng) for _ in range(2))
    if two[0] < one[1]:
        return flip_a_bit(data, rng)
    return (
        data[: one[0]]
        + data[two[0] : two[1]]
        + data[one[1] : two[0]]
        + data[one[0] : one[1]]
        + data[two[1] :]
    )


def nest(data: bytes, rng: random.Random) -> bytes:
    """Deep brackets somewhere."""
    bracket = rng.choice([b"[", b'{"a":', b"(", b"{{", b"{%", b"{"])
    at = rng.choice([0, len(data), *(m.start() for m in re.finditer(rb"[\[{\d\"]", data[:65536]))])
    return data[:at] + bracket * rng.choice([600, MANY]) + data[at:]


def not_utf8(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are no UTF-8, or a byte order mark."""
    bad = rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80", b"\xef\xbb\xbf"])
    at = rng.randrange(len(data) + 1)
    return data[:at] + bad + data[at:]


def nul(data: bytes, rng: random.Random) -> bytes:
    """Zeros in the middle."""
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes(rng.choice([1, 16, 4096])) + data[at:]


def huge_number(data: bytes, rng: random.Random) -> bytes:
    """A number that stands in the text is another one."""
    found = list(re.finditer(rb"-?\d+(\.\d+)?", data[: 1 << 20]))
    if not found:
        return flip_bits(data, rng)
    one = rng.choice(found)
    return data[: one.start()] + rng.choice(HUGE).encode() + data[one.end() :]


def escape(data: bytes, rng: random.Random) -> bytes:
    """An escape in a string: a lone surrogate, a zero, a terminal's command."""
    found = [m.end() for m in re.finditer(rb'"', data[: 1 << 20])]
    if not found:
        return nul(data, rng)
    at = rng.choice(found)
    said = rng.choice([rb"\ud800", rb"\u0000", rb"\u001b[2J", rb"{{ 9**9**9 }}", b"</script>"])
    return data[:at] + said + data[at:]


def other_kind(data: bytes, rng: random.Random) -> bytes:
    """Nothing, an archive, or a document of another kind."""
    return rng.choice([*OTHER_KINDS, _packed_spaces()])


@cache
def _packed_spaces() -> bytes:
    """300 MB of spaces in 300 kB."""
    return gzip.compress(b" " * (300 << 20), 1)


def json_document(data: bytes, rng: random.Random) -> bytes:
    """One node of a JSON document, or of one line of several, is changed."""
    lines = data.split(b"\n")
    try:
        value = json.loads(data)
    except ValueError:
        at = rng.randrange(len(lines))
        try:
            value = json.loads(lines[at])
        except ValueError:
            return swap(data, rng)
        lines[at] = _encoded(_changed(value, rng))
        return b"\n".join(lines)
    return _encoded(_changed(value, rng))


def toml_document(data: bytes, rng: random.Random) -> bytes:
    """One line is given another value, name or place, or stands twice."""
    lines = data.decode().splitlines()
    settings = [index for index, line in enumerate(lines) if "=" in line]
    at, other = rng.choice(settings), rng.choice(settings)
    name, _, value = lines[at].partition(" = ")
    act = rng.randrange(6)
    if act <= 2:
        lines[at] = f"{name} = {rng.choice(TOML_VALUES)}"
    elif act == 3:
        lines[at] = f"{name} = {lines[other].partition(' = ')[2]}"
    elif act == 4:
        lines[at] = rng.choice([f"{name}x = {value}", f"{name}.a = {value}", f"[{name}]", ""])
    else:
        lines.insert(other, lines[at])
    return "\n".join(lines).encode()


def safetensors_header(data: bytes, rng: random.Random) -> bytes:
    """The header says something else, its length fits."""
    length = int.from_bytes(data[:8], "little")
    changed = json_document(data[8 : 8 + length], rng)
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


def safetensors_length(data: bytes, rng: random.Random) -> bytes:
    """The length before the header is another one."""
    return rng.choice([0, 2**63, 2**40, 2, len(data)]).to_bytes(8, "little") + data[8:]


def in_gzip(data: bytes, rng: random.Random) -> bytes:
    """What is packed is damaged, the packing is sound."""
    inner = gzip.decompress(data)
    mutation = rng.choice([json_document, *BYTES])
    return gzip.compress(mutation(inner, rng), 1)


BYTES: tuple[Mutation, ...] = (
    *(flip_a_bit, flip_bits, truncate, delete, duplicate, swap, nest, not_utf8, nul),
    *(huge_number, escape, other_kind),
)
BY_KIND: dict[str, tuple[Mutation, ...]] = {
    ".json": (json_document,) * 12,
    ".jsonl": (json_document,) * 12,
    ".toml": (toml_document,) * 12,
    ".safetensors": (safetensors_header,) * 8 + (safetensors_length,) * 2,
    ".gz": (in_gzip,) * 12,
}
OTHER_KINDS = (
    *(b"", bytes(64), b"null", b"[]", b"{}", b"\x1f\x8b\x08\0", b"PK\3\4", b"GGUF", b"\n" * 99),
)
PLACES = ("missing", "a folder", "a link to itself", "two links in a circle")
"""What may stand where the file was."""


def mutate(name: str, data: bytes, rng: random.Random) -> tuple[str, bytes | None]:
    """What was done, and the damaged bytes; None where one of `PLACES` is to stand there."""
    if rng.random() < 0.04:
        return rng.choice(PLACES), None
    suffix = name[name.rfind(".") :]
    mutation = rng.choice([*BYTES, *BY_KIND.get(suffix, ())])
    if not data:
        mutation = other_kind
    return mutation.__name__, mutation(data, rng)


def _stretch(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice([1, 4, 16, 256, 4096, len(data)]))


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _changed(value: Any, rng: random.Random) -> Any:
    """A copy with one node changed."""
    places = list(_places(value, ()))
    if not places:
        return rng.choice(WRONG)
    path = rng.choice(places)
    holder = value
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    act = rng.randrange(8)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif act == 2:
        other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]
    elif act == 3 and isinstance(holder, list):
        holder.append(holder[key])
    elif act == 4:
        deep: Any = holder[key]
        for _ in range(300):  # deeper ones are written as text, by `nest`
            deep = [deep]
        holder[key] = deep
    else:
        holder[key] = rng.choice(WRONG)
    return value


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, one in pairs:
        yield (*path, key)
        if len(path) < 12:
            yield from _places(one, (*path, key))
