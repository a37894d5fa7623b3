"""Mutations of a file, each a pure function of its bytes and a random generator."""

import gzip
import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any

__all__ = ["REPLACEMENTS", "mutate"]

Mutation = Callable[[bytes, random.Random], bytes]
NESTING_DEPTH = 100_000

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
    """Flip one bit."""
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    """Overwrite several bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(2, 16)):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    """Cut off the file at a random byte."""
    return data[: rng.randrange(len(data))]


def delete(data: bytes, rng: random.Random) -> bytes:
    """Delete a range."""
    start, end = _random_range(data, rng)
    return data[:start] + data[end:]


def duplicate(data: bytes, rng: random.Random) -> bytes:
    """Duplicate a range."""
    start, end = _random_range(data, rng)
    return data[:end] + data[start:]


def swap(data: bytes, rng: random.Random) -> bytes:
    """Swap two ranges."""
    first, second = sorted(_random_range(data, rng) for _ in range(2))
    if second[0] < first[1]:
        return flip_a_bit(data, rng)
    return (
        data[: first[0]]
        + data[second[0] : second[1]]
        + data[first[1] : second[0]]
        + data[first[0] : first[1]]
        + data[second[1] :]
    )


def nest(data: bytes, rng: random.Random) -> bytes:
    """Insert deeply nested brackets."""
    bracket = rng.choice([b"[", b'{"a":', b"(", b"{{", b"{%", b"{"])
    offset = rng.choice(
        [0, len(data), *(m.start() for m in re.finditer(rb"[\[{\d\"]", data[:65536]))]
    )
    return data[:offset] + bracket * rng.choice([600, NESTING_DEPTH]) + data[offset:]


def not_utf8(data: bytes, rng: random.Random) -> bytes:
    """Insert bytes that are not UTF-8, or a byte order mark."""
    invalid = rng.choice([b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf8\x88\x80", b"\xef\xbb\xbf"])
    offset = rng.randrange(len(data) + 1)
    return data[:offset] + invalid + data[offset:]


def nul(data: bytes, rng: random.Random) -> bytes:
    """Insert zero bytes."""
    offset = rng.randrange(len(data) + 1)
    return data[:offset] + bytes(rng.choice([1, 16, 4096])) + data[offset:]


def huge_number(data: bytes, rng: random.Random) -> bytes:
    """Replace a number in the text by an extreme one."""
    numbers = list(re.finditer(rb"-?\d+(\.\d+)?", data[: 1 << 20]))
    if not numbers:
        return flip_bits(data, rng)
    number = rng.choice(numbers)
    return data[: number.start()] + rng.choice(HUGE).encode() + data[number.end() :]


def escape(data: bytes, rng: random.Random) -> bytes:
    """Insert an escape sequence into a string: lone surrogate, NUL, terminal command."""
    offsets = [m.end() for m in re.finditer(rb'"', data[: 1 << 20])]
    if not offsets:
        return nul(data, rng)
    offset = rng.choice(offsets)
    sequence = rng.choice([rb"\ud800", rb"\u0000", rb"\u001b[2J", rb"{{ 9**9**9 }}", b"</script>"])
    return data[:offset] + sequence + data[offset:]


def other_content(data: bytes, rng: random.Random) -> bytes:
    """Replace the content by nothing, an archive, or another format."""
    return rng.choice([*OTHER_CONTENTS, _compressed_spaces()])


@cache
def _compressed_spaces() -> bytes:
    """300 MB of spaces, compressed to 300 kB."""
    return gzip.compress(b" " * (300 << 20), 1)


def json_document(data: bytes, rng: random.Random) -> bytes:
    """Change one node of a JSON document or of one JSON line."""
    lines = data.split(b"\n")
    try:
        value = json.loads(data)
    except ValueError:
        line_index = rng.randrange(len(lines))
        try:
            value = json.loads(lines[line_index])
        except ValueError:
            return swap(data, rng)
        lines[line_index] = _encoded(_changed(value, rng))
        return b"\n".join(lines)
    return _encoded(_changed(value, rng))


def toml_document(data: bytes, rng: random.Random) -> bytes:
    """Change the value, key or position of one line, or duplicate it."""
    lines = data.decode().splitlines()
    settings = [number for number, line in enumerate(lines) if "=" in line]
    index, other_index = rng.choice(settings), rng.choice(settings)
    name, _, value = lines[index].partition(" = ")
    action = rng.randrange(6)
    if action <= 2:
        lines[index] = f"{name} = {rng.choice(TOML_VALUES)}"
    elif action == 3:
        lines[index] = f"{name} = {lines[other_index].partition(' = ')[2]}"
    elif action == 4:
        lines[index] = rng.choice([f"{name}x = {value}", f"{name}.a = {value}", f"[{name}]", ""])
    else:
        lines.insert(other_index, lines[index])
    return "\n".join(lines).encode()


def safetensors_header(data: bytes, rng: random.Random) -> bytes:
    """Change the header and adjust its length."""
    length = int.from_bytes(data[:8], "little")
    changed = json_document(data[8 : 8 + length], rng)
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


def safetensors_length(data: bytes, rng: random.Random) -> bytes:
    """Change only the length of the header."""
    return rng.choice([0, 2**63, 2**40, 2, len(data)]).to_bytes(8, "little") + data[8:]


def in_gzip(data: bytes, rng: random.Random) -> bytes:
    """Damage the compressed content in a valid gzip file."""
    inner = gzip.decompress(data)
    mutation = rng.choice([json_document, *BYTES])
    return gzip.compress(mutation(inner, rng), 1)


BYTES: tuple[Mutation, ...] = (
    *(flip_a_bit, flip_bits, truncate, delete, duplicate, swap, nest, not_utf8, nul),
    *(huge_number, escape, other_content),
)
BY_SUFFIX: dict[str, tuple[Mutation, ...]] = {
    ".json": (json_document,) * 12,
    ".jsonl": (json_document,) * 12,
    ".toml": (toml_document,) * 12,
    ".safetensors": (safetensors_header,) * 8 + (safetensors_length,) * 2,
    ".gz": (in_gzip,) * 12,
}
OTHER_CONTENTS = (
    *(b"", bytes(64), b"null", b"[]", b"{}", b"\x1f\x8b\x08\0", b"PK\3\4", b"GGUF", b"\n" * 99),
)
REPLACEMENTS = ("missing", "a folder", "a link to itself", "two links in a circle")
"""Replacements for the file itself."""


def mutate(name: str, data: bytes, rng: random.Random) -> tuple[str, bytes | None]:
    """Return the mutation's name and the damaged bytes; None for one of `REPLACEMENTS`."""
    if rng.random() < 0.04:
        return rng.choice(REPLACEMENTS), None
    suffix = name[name.rfind(".") :]
    mutation = rng.choice([*BYTES, *BY_SUFFIX.get(suffix, ())])
    if not data:
        mutation = other_content
    return mutation.__name__, mutation(data, rng)


def _random_range(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice([1, 4, 16, 256, 4096, len(data)]))


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with one node changed, in place."""
    paths = list(_paths(value, ()))
    if not paths:
        return rng.choice(WRONG)
    path = rng.choice(paths)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    action = rng.randrange(8)
    if action == 0:
        del parent[key]
    elif action == 1 and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    elif action == 2:
        other_key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other_key] = parent[other_key], parent[key]
    elif action == 3 and isinstance(parent, list):
        parent.append(parent[key])
    elif action == 4:
        deep: Any = parent[key]
        for _ in range(300):  # deeper ones are written as text, by `nest`
            deep = [deep]
        parent[key] = deep
    else:
        parent[key] = rng.choice(WRONG)
    return value


def _paths(value: Any, path: tuple[Any, ...]) -> Any:
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, child in pairs:
        yield (*path, key)
        if len(path) < 12:
            yield from _paths(child, (*path, key))
