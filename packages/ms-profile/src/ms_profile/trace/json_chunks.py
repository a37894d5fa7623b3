"""Read a trace's JSON as lists of records, half a megabyte at a time.

A chunk must end between two events. A candidate boundary is confirmed by decoding the text before
it as a JSON list; a boundary inside a nested object leaves the list open and fails. Kineto writes
`  },` and `  {` between events on separate lines, and JSON strings have no raw line breaks, so for
its layout the first guess is right. For other layouts, boundaries `}, {` are tried from the end.
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
from ms_profile.trace.records import DAMAGE, TraceEvent

CHUNK_BYTES = 1 << 19  # larger chunks leave the cache and make the allocator fault pages in again
HEADER_BYTES = 64 << 20  # limit of the text before `traceEvents`
EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
KINETO_BOUNDARY = b"\n  },\n  {"
ANY_BOUNDARY = re.compile(rb"\}\s*,\s*\{")
CLOSING = ord("]")
MAX_TRIES = 32  # boundaries tried per chunk before more text is read
MAX_CHUNKS = 64  # limit of an undecodable range: 32 MiB
# Last event, end of the list, flat members such as `traceName`, and the object's closing brace.
END = re.compile(rb'\}\s*\]\s*(,\s*"[^"]*"\s*:[^{}\[\]]*)*\}?\s*\Z')

OpenFile = AbstractContextManager[BufferedReader | gzip.GzipFile]
decode_records = msgspec.json.Decoder(list[TraceEvent]).decode
decode_record = msgspec.json.Decoder(TraceEvent).decode
parse_value = json.JSONDecoder().raw_decode
"""Parse the first JSON value of a text; returns it and the position of its end."""


class TraceText:
    """Reader of one trace file; problems are collected in `warnings`.

    Args:
        path: JSON object with `traceEvents`, or JSON list of events; plain or gzip.

    Raises:
        TraceError: the file is empty or is not a trace.
    """

    def __init__(self, path: Path, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        """Members other than `traceEvents`; complete once `records` is exhausted."""
        self.warnings: list[str] = []
        self.damaged = 0
        """Number of events that could not be read."""
        self._next_try = 0
        """Text length at which a chunk without a confirmed boundary is tried again."""
        self._broken = False
        self._chunk_bytes = chunk_bytes

    def records(self) -> Iterator[list[TraceEvent]]:
        """Yield the records in file order."""
        try:
            check_file(self.path, error=TraceError)
            with self.path.open("rb") as raw, self._unpacked(raw) as file:
                yield from self._chunks(lambda: self._read(file))
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise TraceError(f"{self.path} is not a valid gzip file: {error}") from error
            raise TraceError(f"cannot read {self.path}: {error}") from error

    def _unpacked(self, raw: BufferedReader) -> OpenFile:
        start = raw.read(2)
        raw.seek(0)
        # gzip's magic number (RFC 1952), as the file's name may say otherwise.
        return gzip.GzipFile(fileobj=raw) if start == b"\x1f\x8b" else nullcontext(raw)

    def _read(self, file: BufferedReader | gzip.GzipFile) -> bytes:
        """Read up to one chunk of text; if compressed data breaks off, all text before that."""
        parts: list[bytes] = []
        remaining = self._chunk_bytes
        try:
            # Plain `read` would discard the data it has when it reaches the damage.
            while remaining > 0 and (part := file.read1(remaining)):
                parts.append(part)
                remaining -= len(part)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if file.tell() == 0:
                raise TraceError(
                    f"{self.path} is a gzip file that is damaged at its start: {error}"
                ) from error
            if not self._broken:
                self._broken = True
                self.warnings.append(f"{self.path.name}: compressed data is truncated: {error}")
        return b"".join(parts)

    def _chunks(self, read: Callable[[], bytes]) -> Iterator[list[TraceEvent]]:
        remainder = self._read_to_first_event(read)
        while block := read():
            # With the bracket, every remainder is the start of a JSON list of events.
            text = bytearray().join((b"[", remainder, block))
            records, used = self._decode_part(text)
            remainder = bytes(memoryview(text)[used:])
            if records:
                yield records
            del records  # decoding reuses their memory while the cache still holds it
        yield self._decode_tail(remainder)

    def _read_to_first_event(self, read: Callable[[], bytes]) -> bytes:
        """Read up to the first event; return the text already read after it."""
        text = read()
        if not text.strip():
            raise TraceError(f"{self.path} is empty; was the profiler stopped before it wrote?")
        # A bare list of events, without a header.
        if text.lstrip().startswith(b"["):
            return text.lstrip()[1:]
        while True:
            match = EVENTS.search(text)
            if match:
                break
            block = read() if len(text) < HEADER_BYTES else b""
            if not block:
                raise TraceError(
                    f"{self.path} has no traceEvents, so it is not a profiler trace; it starts "
                    f"with {text[:40]!r}"
                )
            text += block
        # This text ends with a brace or a comma, so a dummy member completes the object.
        self._take_header(text[: match.start()] + b'"_":0}')
        return text[match.end() :]

    def _take_header(self, text: bytes) -> None:
        try:
            header = msgspec.json.decode(text)
        except DAMAGE as error:
            self.warnings.append(
                f"{self.path.name}: the header is damaged ({error}); the trace's rank and host "
                "may be lost"
            )
            return
        if isinstance(header, dict):
            self.header.update(header)

    def _decode_part(self, text: bytearray) -> tuple[list[TraceEvent], int]:
        """Decode all complete events; return them and the position of the next event.

        Writes the list's closing bracket over the separator in place, to avoid a copy.
        """
        cut = text.rfind(KINETO_BOUNDARY)
        if cut >= 0:
            # `end` is the comma between two events, which the bracket overwrites.
            end = cut + len(b"\n  }")
            return self._decode_list(text, end), end + 1
        # Wait for more text. Position 1 is after the bracket that `_chunks` has added.
        if len(text) < self._next_try:
            return [], 1
        matches = [match.start() + 1 for match in ANY_BOUNDARY.finditer(text)]
        # From the last boundary backward, to decode the longest valid list.
        for end in matches[: -MAX_TRIES - 1 : -1]:
            following = text.index(b",", end) + 1
            if (decoded := self._try_decode_list(text, end)) is not None:
                self._next_try = 0
                return decoded, following
        if len(text) < MAX_CHUNKS * self._chunk_bytes:
            self._next_try = 2 * len(text)  # doubling keeps the total time of all tries linear
            return [], 1
        self._next_try = 0
        if not matches:
            raise TraceError(
                f"{self.path} has an event of over {len(text)} bytes, so it is not a trace; pass a "
                "file that a profiler wrote"
            )
        end = matches[-1]
        # No boundary gives a valid list, so an event is damaged: decode each event separately.
        return self._decode_each(bytes(text[1:end])), text.index(b",", end) + 1

    def _try_decode_list(self, text: bytearray, end: int) -> list[TraceEvent] | None:
        """Decode the list up to `end`; if it is incomplete, restore `text` and return None."""
        separator, text[end] = text[end], CLOSING
        try:
            return decode_records(memoryview(text)[: end + 1])
        # A value is out of range. This is raised before the end of the text is reached, so
        # whether the list is complete must be checked separately.
        except msgspec.ValidationError:
            if self._is_list(bytes(text[1:end])):
                return self._decode_each(bytes(text[1:end]))
        except DAMAGE:
            pass
        text[end] = separator
        return None

    def _decode_list(self, text: bytearray, end: int) -> list[TraceEvent]:
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

    def _decode_each(self, text: bytes) -> list[TraceEvent]:
        """Decode event by event and skip damaged ones."""
        records: list[TraceEvent] = []
        for piece in self._pieces(text):
            try:
                records.append(decode_record(piece))
            except DAMAGE:
                self.damaged += 1
        return records

    def _pieces(self, text: bytes) -> list[bytes | msgspec.Raw]:
        with suppress(*DAMAGE):
            return list(msgspec.json.decode(b"[" + text + b"]", type=list[msgspec.Raw]))
        # Not JSON: cut at the boundaries, so that the damage stays within one piece.
        boundary = re.compile(rb"\n  \},\n  \{") if KINETO_BOUNDARY in text else ANY_BOUNDARY
        ends = [match.start() for match in boundary.finditer(text)]
        starts = [0, *(text.index(b",", end) + 1 for end in ends)]
        stops = [*(text.index(b"}", end) + 1 for end in ends), len(text)]
        return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _decode_tail(self, text: bytes) -> list[TraceEvent]:
        """Decode the text after the last boundary: one event, `]`, and the rest of the header."""
        with suppress(ValueError, RecursionError):
            # Latin-1 maps each byte to one character, and JSON's delimiters are ASCII.
            _, after = parse_value("[" + text.decode("latin-1"))
            self._take_header(b"{" + (text[after - 1 :].strip().lstrip(b",") or b"}"))
            return self._decode_list(bytearray(b"[" + text[: after - 1]), after - 1)
        # The members after the list are damaged: find the bracket that closes the list.
        end = len(text)
        for _ in range(MAX_TRIES):
            end = text.rfind(b"]", 0, end)
            if end < 0:
                break
            if self._is_list(text[:end]):
                self._take_header(b"{" + (text[end + 1 :].strip().lstrip(b",") or b"}"))
                return self._decode_list(bytearray(b"[" + text[: end + 1]), end + 1)
        # The file ends properly but an event in the list is damaged: only that event is skipped.
        closed = END.search(text, max(0, len(text) - 4096))
        if closed and self._last_event_is_valid(text[: closed.start() + 1]):
            return self._decode_each(text[: closed.start() + 1])
        self.warnings.append(f"{self.path.name}: the trace is truncated; using the events before")
        return self._decode_broken(text)

    def _last_event_is_valid(self, text: bytes) -> bool:
        """Return whether the last event is valid, so that the damage is before it."""
        with suppress(*DAMAGE):
            decode_record(self._pieces(text)[-1])
            return True
        return False

    def _decode_broken(self, text: bytes) -> list[TraceEvent]:
        """Decode the complete events of a text that breaks off inside an event."""
        self._next_try = 0
        opened = bytearray(b"[" + text)
        records, used = self._decode_part(opened) if b"}" in text else ([], 1)
        # The last event may be complete although no boundary follows it.
        last = bytes(opened[used : opened.rfind(b"}", used) + 1])
        with suppress(*DAMAGE):
            records.append(decode_record(last))
        return records
