"""A trace's text as lists of records, half a megabyte at a time.

A chunk ends where the text up to there is a whole JSON list, which decoding it proves: a boundary
inside a nested object leaves the list open. Kineto's own layout puts `  },` and `  {` on lines of
their own between events, and no text inside JSON holds a raw line break, so there the first guess
is right; for any other layout the boundaries `}, {` are tried from the end backwards.
"""

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from ms_profile.errors import TraceError
from ms_profile.files.untrusted import check_file
from ms_profile.trace.records import DAMAGE, Record

CHUNK_BYTES = 1 << 19  # larger ones leave the cache and the allocator pages them in anew
HEADER_BYTES = 64 << 20
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
KINETO_BOUNDARY = b"\n  },\n  {"
ANY_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
CLOSING = ord("]")
TRIES = 32
MOST_CHUNKS = 64
END = re.compile(rb'\}\s*\]\s*(,\s*"[^"]*"\s*:[^{}\[\]]*)*\}?\s*\Z')

OpenFile = AbstractContextManager[BufferedReader | gzip.GzipFile]
decode_records = msgspec.json.Decoder(list[Record]).decode
decode_record = msgspec.json.Decoder(Record).decode
parse_value = json.JSONDecoder().raw_decode
"""Parses the first JSON value of a text; returns it and where it ends."""


class TraceText:
    """The records of one file, and what could not be read of it in `warnings`.

    Args:
        path: JSON as an object with `traceEvents` or as a bare list of events; gzip or plain.

    Raises:
        TraceError: the file is empty or no trace.
    """

    def __init__(self, path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        """What stands beside `traceEvents`; complete once `records` is exhausted."""
        self.warnings: list[str] = []
        self.damaged = 0
        """Events that could not be read."""
        self._next_try = 0
        """Length of text at which a chunk that no boundary ended is tried again."""
        self._broken = False
        self._chunk_bytes = chunk_bytes

    def records(self) -> Iterator[list[Record]]:
        """Yield the records in order of the file."""
        try:
            check_file(self.path, error=TraceError)
            with self.path.open("rb") as raw, self._unpacked(raw) as file:
                yield from self._chunks(lambda: self._read(file))
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise TraceError(f"{self.path} is no gzip file: {error}") from error
            raise TraceError(f"{self.path} cannot be read: {error}") from error

    def _unpacked(self, raw: BufferedReader) -> OpenFile:
        start = raw.read(2)
        raw.seek(0)
        return gzip.GzipFile(fileobj=raw) if start == b"\x1f\x8b" else nullcontext(raw)

    def _read(self, file: BufferedReader | gzip.GzipFile) -> bytes:
        """Read up to a chunk of text; of compressed data that breaks off, all that came before."""
        parts: list[bytes] = []
        room = self._chunk_bytes
        try:
            # A plain `read` would drop what it has when it meets the damage.
            while room > 0 and (part := file.read1(room)):
                parts.append(part)
                room -= len(part)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if file.tell() == 0:
                raise TraceError(
                    f"{self.path} is a gzip file damaged at its start: {error}"
                ) from error
            if not self._broken:
                self._broken = True
                self.warnings.append(f"{self.path.name}: compressed data breaks off: {error}")
        return b"".join(parts)

    def _chunks(self, read: Callable[[], bytes]) -> Iterator[list[Record]]:
        rest = self._begin(read)
        while block := read():
            text = bytearray().join((b"[", rest, block))
            records, used = self._decode_part(text)
            rest = bytes(memoryview(text)[used:])
            if records:
                yield records
            del records  # decoding reuses their memory while the cache still holds it
        yield self._decode_tail(rest)

    def _begin(self, read: Callable[[], bytes]) -> bytes:
        """Read up to the first event; return the text read beyond it."""
        text = read()
        if not text.strip():
            raise TraceError(f"{self.path} is empty; the profiler was stopped before it wrote")
        if text.lstrip().startswith(b"["):
            return text.lstrip()[1:]
        while True:
            found = EVENTS.search(text)
            if found:
                break
            block = read() if len(text) < HEADER_BYTES else b""
            if not block:
                raise TraceError(
                    f"{self.path} has no traceEvents: it is no trace of a profiler; it begins "
                    f"{text[:40]!r}"
                )
            text += block
        self._take_header(text[: found.start()] + b'"_":0}')
        return text[found.end() :]

    def _take_header(self, text: bytes) -> None:
        try:
            found = msgspec.json.decode(text)
        except DAMAGE as error:
            self.warnings.append(
                f"{self.path.name}: what stands beside the events is damaged ({error}); the trace's"
                " rank and host may be among it"
            )
            return
        if isinstance(found, dict):
            self.header.update(found)

    def _decode_part(self, text: bytearray) -> tuple[list[Record], int]:
        """Decode as many whole events as there are after the bracket; also where the next begins.

        The bracket that closes the list is put over the separator: nothing is copied.
        """
        cut = text.rfind(KINETO_BOUNDARY)
        if cut >= 0:
            end = cut + len(b"\n  }")
            return self._decode_list(text, end), end + 1
        if len(text) < self._next_try:
            return [], 1
        matches = [found.start() + 1 for found in ANY_BOUNDARY.finditer(text)]
        for end in matches[: -TRIES - 1 : -1]:
            following = text.index(b",", end) + 1
            if (records := self._decode_whole(text, end)) is not None:
                self._next_try = 0
                return records, following
        if len(text) < MOST_CHUNKS * self._chunk_bytes:
            self._next_try = 2 * len(text)  # doubled, so that all tries together take linear time
            return [], 1
        self._next_try = 0
        if not matches:
            raise TraceError(f"{self.path} has an event of over {len(text)} bytes; it is no trace")
        end = matches[-1]
        return self._decode_each(bytes(text[1:end])), text.index(b",", end) + 1

    def _decode_whole(self, text: bytearray, end: int) -> list[Record] | None:
        """Decode the list up to `end`; None, and `text` as it was, where it is no whole list."""
        stood, text[end] = text[end], CLOSING
        try:
            return decode_records(memoryview(text)[: end + 1])
        except msgspec.ValidationError:
            if self._is_list(bytes(text[1:end])):
                return self._decode_each(bytes(text[1:end]))
        except DAMAGE:
            pass
        text[end] = stood
        return None

    def _decode_list(self, text: bytearray, end: int) -> list[Record]:
        text[end] = CLOSING
        try:
            return decode_records(memoryview(text)[: end + 1])
        except DAMAGE:
            return self._decode_each(bytes(text[1:end]))

    def _is_list(self, text: bytes) -> bool:
        try:
            msgspec.json.decode(b"".join((b"[", text, b"]")), type=list[msgspec.Raw])
        except DAMAGE:
            return False
        return True

    def _decode_each(self, text: bytes) -> list[Record]:
        """Decode event by event and leave out those that are damaged."""
        records: list[Record] = []
        for piece in self._pieces(text):
            try:
                records.append(decode_record(piece))
            except DAMAGE:
                self.damaged += 1
        return records

    def _pieces(self, text: bytes) -> list[bytes | msgspec.Raw]:
        with suppress(*DAMAGE):
            return list(msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw]))
        boundary = re.compile(rb"\n  \},\n  \{") if KINETO_BOUNDARY in text else ANY_BOUNDARY
        ends = [found.start() for found in boundary.finditer(text)]
        starts = [0, *(text.index(b",", end) + 1 for end in ends)]
        stops = [*(text.index(b"}", end) + 1 for end in ends), len(text)]
        return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _decode_tail(self, text: bytes) -> list[Record]:
        """Decode what follows the last boundary: an event, `]` and what stands beside the list."""
        with suppress(ValueError, RecursionError):
            # Latin-1 keeps one character for each byte, and JSON's own signs are ASCII.
            _, after = parse_value("[" + text.decode("latin-1"))
            self._take_header(b"{" + text[after - 1 :].strip().lstrip(b",") or b"}")
            return self._decode_list(bytearray(b"[" + text[: after - 1]), after - 1)
        end = len(text)
        for _ in range(TRIES):
            end = text.rfind(b"]", 0, end)
            if end < 0:
                break
            if self._is_list(text[:end]):
                self._take_header(b"{" + text[end + 1 :].strip().lstrip(b",") or b"}")
                return self._decode_list(bytearray(b"[" + text[: end + 1]), end + 1)
        closed = END.search(text, max(0, len(text) - 4096))
        if closed and self._ends_whole(text[: closed.start() + 1]):
            return self._decode_each(text[: closed.start() + 1])
        self.warnings.append(f"{self.path.name}: the trace breaks off; what came before is used")
        return self._decode_broken(text)

    def _ends_whole(self, text: bytes) -> bool:
        """Return whether the last event is sound: then what is damaged lies before it."""
        with suppress(*DAMAGE):
            decode_record(self._pieces(text)[-1])
            return True
        return False

    def _decode_broken(self, text: bytes) -> list[Record]:
        """Decode the whole events at the start of a text that breaks off inside one."""
        self._next_try = 0
        opened = bytearray(b"[" + text)
        records, used = self._decode_part(opened) if b"}" in text else ([], 1)
        last = bytes(opened[used : opened.rfind(b"}", used) + 1])
        with suppress(*DAMAGE):
            records.append(decode_record(last))
        return records
