"""Reads web archives: texts that were extracted (WET), and pages, whose text is taken here.

A document is a record of plain text (`conversion`), or the text of a page of HTML or plain text
that was answered (`response` with status 200). Other records are passed over. A record's frame is
read strictly; what lies in it, by warcio, and the text of HTML by resiliparse.
"""

import io
from collections.abc import Iterator
from typing import Any

from ms_data.corpus.reader import (
    TOO_LONG,
    FileReader,
    Found,
    Invalid,
    OpenFile,
    ReadOptions,
    damaged,
    library,
    not_utf8,
)
from ms_data.corpus.unpacking import Content
from ms_data.errors import CorpusError

_HEADER_LIMIT_BYTES = 1 << 20
_VERSIONS = (b"WARC/1.0\r\n", b"WARC/1.1\r\n", b"WARC/0.17\r\n", b"WARC/0.18\r\n")
_HTML = ("text/html", "application/xhtml+xml")
_PLAIN = "text/plain"
_READ = {b"conversion", b"response"}
_PASSED = {b"warcinfo", b"resource", b"request", b"metadata", b"revisit", b"continuation"}


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    if options.parse is not None:
        raise CorpusError(f"{file.path}: a web archive holds no rows; give JSON Lines or a table")
    warcio = library("warcio.recordloader", "warc", file)
    content, limit = Content(file.blocks), options.document_limit_bytes
    number = 0
    while head := _head(content, file):
        number += 1
        fields = _fields(head)
        size = _size(fields, number, file)
        place = f"{file.path}: record {number}"
        kind = fields.get(b"warc-type", b"").lower()
        if kind not in _READ | _PASSED:
            raise damaged(file, "web archive", f"record {number} is of the kind {kind[:40]!r}")
        found: Found = ""
        if number <= start or kind not in _READ:
            read = content.skip(size)
        elif size > limit:
            found, read = Invalid(f"{place}: {TOO_LONG}"), content.skip(size)
        else:
            block = content.read(size)
            read = len(block)
            if read == size:
                found = _document(warcio, head + block, place, file, limit)
        if read != size or content.read(4) != b"\r\n\r\n":
            raise damaged(file, "web archive", f"record {number} is not as long as it says")
        if number > start:
            yield found


def _head(content: Content, file: OpenFile) -> bytes:
    """Read what stands before the block of a record; nothing where the file ends."""
    lines = [content.line(_HEADER_LIMIT_BYTES)]
    if lines[0] and lines[0] not in _VERSIONS:
        raise damaged(file, "web archive", f"a record begins with {lines[0][:40]!r}")
    left = _HEADER_LIMIT_BYTES
    while lines[-1] not in (b"", b"\r\n"):
        lines.append(content.line(left))
        left -= len(lines[-1])
    if lines[0] and lines[-1] != b"\r\n":
        raise damaged(file, "web archive", "it ends inside a record's head, or that is endless")
    return b"".join(lines)


def _fields(head: bytes) -> dict[bytes, bytes]:
    named = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in named}


def _size(fields: dict[bytes, bytes], number: int, file: OpenFile) -> int:
    said = fields.get(b"content-length", b"")
    if not said.isdigit() or len(said) > 15:
        raise damaged(file, "web archive", f"record {number} has a length of {said[:40]!r}")
    return int(said)


def _document(warcio: Any, content: bytes, place: str, file: OpenFile, limit: int) -> Found:
    """Take the text of one record, given whole."""
    try:
        loader = warcio.ArcWarcRecordLoader()
        record = loader.parse_record_stream(io.BytesIO(content), check_digests=True)
        block: bytes = record.content_stream().read(limit + 1)
        record.raw_stream.read()  # to its end, up to where its checksum is known
    except Exception as error:  # zlib's, brotli's and its own, with no base of theirs
        return Invalid(f"{place}: cannot be read: {' '.join(str(error).split())[:200]}")
    if record.digest_checker.passed is False:
        raise damaged(file, "web archive", f"{place}: its checksum does not match its bytes")
    if len(block) > limit:
        return Invalid(f"{place}: {TOO_LONG}")
    if record.rec_type == "conversion":
        problem = not_utf8(block)
        return Invalid(f"{place}: {problem}") if problem else block.decode()
    return _page(record.http_headers, block, place, file)


def _page(headers: Any, block: bytes, place: str, file: OpenFile) -> Found:
    """Take the text of an answer, if it is a page."""
    if headers is None or headers.get_statuscode() != "200":
        return ""
    kind, _, more = (headers.get_header("content-type") or "").lower().partition(";")
    if kind.strip() not in (*_HTML, _PLAIN):
        return ""
    encodings = library("resiliparse.parse.encoding", "warc", file)
    _, _, named = more.partition("charset=")
    encoding = named.split(";")[0].strip(" \"'") or encodings.detect_encoding(block)
    try:
        text: str = encodings.bytes_to_str(block, encoding, errors="replace")
        if kind.strip() != _PLAIN:
            html = library("resiliparse.extract.html2text", "warc", file)
            text = html.extract_plain_text(text, alt_texts=False)
        text.encode()
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        return Invalid(f"{place}: no page that can be read: {' '.join(str(error).split())[:200]}")
    return text


READER = FileReader(documents=_documents, suffixes=(".warc", ".wet"), signatures=_VERSIONS)
