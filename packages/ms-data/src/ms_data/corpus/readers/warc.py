"""Reads web archives: extracted text (WET), and pages whose text is extracted here (WARC).

A document is a plain text record (`conversion`), or the text of an HTML or plain text page
(`response` with status 200). Other records are skipped. Record framing is parsed strictly here;
warcio parses the records, and resiliparse extracts text from HTML.
"""

import io
from collections.abc import Iterator
from typing import Any

from ms_data.corpus.reader import (
    TOO_LONG,
    FileReader,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    damaged_file,
    import_library,
    utf8_problem,
)
from ms_data.corpus.unpacking import ByteReader
from ms_data.errors import CorpusError

_HEADER_LIMIT_BYTES = 1 << 20
_VERSIONS = (b"WARC/1.0\r\n", b"WARC/1.1\r\n", b"WARC/0.17\r\n", b"WARC/0.18\r\n")
_HTML = ("text/html", "application/xhtml+xml")
_PLAIN = "text/plain"
_READ = {b"conversion", b"response"}
_SKIPPED = {b"warcinfo", b"resource", b"request", b"metadata", b"revisit", b"continuation"}


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    if options.parse is not None:
        raise CorpusError(f"{file.path}: a web archive holds no rows; use JSON Lines or a table")
    warcio = import_library("warcio.recordloader", "warc", file)
    content, limit = ByteReader(file.blocks), options.document_limit_bytes
    number = 0
    # A record is a head, an empty line, `content-length` bytes, and two line breaks.
    while head := _read_head(content, file):
        number += 1
        fields = _fields(head)
        size = _size(fields, number, file)
        location = f"{file.path}: record {number}"
        record_type = fields.get(b"warc-type", b"").lower()
        if record_type not in _READ | _SKIPPED:
            raise damaged_file(
                file, "web archive", f"record {number} has unknown type {record_type[:40]!r}"
            )
        result: ReadResult = ""
        if number <= start or record_type not in _READ:
            read_bytes = content.skip(size)
        elif size > limit:
            result, read_bytes = Invalid(f"{location}: {TOO_LONG}"), content.skip(size)
        else:
            block = content.read(size)
            read_bytes = len(block)
            if read_bytes == size:
                result = _document(warcio, head + block, location, file, limit)
        if read_bytes != size or content.read(4) != b"\r\n\r\n":  # records end with two line breaks
            raise damaged_file(file, "web archive", f"record {number} does not match its length")
        if number > start:
            yield result


def _read_head(content: ByteReader, file: OpenFile) -> bytes:
    """Read the header lines of a record; empty at the end of the file."""
    lines = [content.line(_HEADER_LIMIT_BYTES)]
    if lines[0] and lines[0] not in _VERSIONS:
        raise damaged_file(file, "web archive", f"a record starts with {lines[0][:40]!r}")
    limit = _HEADER_LIMIT_BYTES
    while lines[-1] not in (b"", b"\r\n"):
        lines.append(content.line(limit))
        limit -= len(lines[-1])
    if lines[0] and lines[-1] != b"\r\n":
        raise damaged_file(file, "web archive", "a record header is cut off or too long")
    return b"".join(lines)


def _fields(head: bytes) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _size(fields: dict[bytes, bytes], number: int, file: OpenFile) -> int:
    length = fields.get(b"content-length", b"")
    if not length.isdigit() or len(length) > 15:
        raise damaged_file(file, "web archive", f"record {number} has a length of {length[:40]!r}")
    return int(length)


def _document(warcio: Any, content: bytes, location: str, file: OpenFile, limit: int) -> ReadResult:
    """Return the text of one complete record."""
    try:
        loader = warcio.ArcWarcRecordLoader()
        record = loader.parse_record_stream(io.BytesIO(content), check_digests=True)
        block: bytes = record.content_stream().read(limit + 1)
        record.raw_stream.read()  # the checksum is only checked at the end of the stream
    except Exception as error:  # zlib, brotli and warcio errors have no common base class
        return Invalid(f"{location}: cannot be read: {' '.join(str(error).split())[:200]}")
    if record.digest_checker.passed is False:
        raise damaged_file(file, "web archive", f"{location}: checksum mismatch")
    if len(block) > limit:
        return Invalid(f"{location}: {TOO_LONG}")
    if record.rec_type == "conversion":
        problem = utf8_problem(block)
        return Invalid(f"{location}: {problem}") if problem else block.decode()
    return _page_text(record.http_headers, block, location, file)


def _page_text(headers: Any, block: bytes, location: str, file: OpenFile) -> ReadResult:
    """Return the text of an HTTP response if it is an HTML or plain text page."""
    if headers is None or headers.get_statuscode() != "200":
        return ""
    content_type, _, parameters = (headers.get_header("content-type") or "").lower().partition(";")
    if content_type.strip() not in (*_HTML, _PLAIN):
        return ""
    encodings = import_library("resiliparse.parse.encoding", "warc", file)
    _, _, charset = parameters.partition("charset=")
    encoding = charset.split(";")[0].strip(" \"'") or encodings.detect_encoding(block)
    try:
        text: str = encodings.bytes_to_str(block, encoding, errors="replace")
        if content_type.strip() != _PLAIN:
            html = import_library("resiliparse.extract.html2text", "warc", file)
            text = html.extract_plain_text(text, alt_texts=False)
        text.encode()
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        return Invalid(f"{location}: unreadable page: {' '.join(str(error).split())[:200]}")
    return text


READER = FileReader(documents=_documents, suffixes=(".warc", ".wet"), signatures=_VERSIONS)
