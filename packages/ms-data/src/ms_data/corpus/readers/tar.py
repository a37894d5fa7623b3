"""Reads WebDataset archives: members that share a name up to the first dot are one sample.

The text of a sample is its .txt member, or else its .json member, which is a row. Members are read
in order and in one piece. Nothing is extracted to disk; names only group the members.
"""

import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

from attrs import define

from ms_data.corpus.file_kinds import BINARY, NotText
from ms_data.corpus.reader import (
    TOO_LONG,
    Invalid,
    OpenFile,
    ReadOptions,
    ReadResult,
    damaged_file,
    utf8_problem,
)
from ms_data.corpus.readers.json_lines import decode_row, json_decoder
from ms_data.corpus.unpacking import ByteReader

_BLOCK = tarfile.BLOCKSIZE
_MAGIC, _MAGIC_OFFSET = b"ustar", 257
_HEADER_LIMIT_BYTES = 1 << 20
"""Largest extended header, such as a long name."""

_TEXT, _ROW = "txt", "json"
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NO_TEXT = NotText("tar archive without .txt or .json", "unpack it and pass the folder")


class _Member(NamedTuple):
    name: str
    size: int


@define
class _TarSample:
    """Consecutive members with the same key."""

    key: str
    members: dict[str, bytes | Invalid]
    """Content of the .txt and .json members, by suffix."""


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[ReadResult]:
    decode = json_decoder(options)
    for number, sample in enumerate(_samples(file, options.document_limit_bytes)):
        if not number and not sample.members:
            yield from [_NO_TEXT][start:]
            return
        if number >= start:
            yield _document(sample, f"{file.path}: {sample.key}", options, decode)


def _document(
    sample: _TarSample,
    location: str,
    options: ReadOptions,
    decode: Callable[[bytes, str], ReadResult],
) -> ReadResult:
    text = sample.members.get(_TEXT)
    if text is None or options.parse is not None:
        row = sample.members.get(_ROW)
        if row is None:
            suffixes = ".json" if options.parse else ".txt or .json"
            return Invalid(f"{location}: no {suffixes} member; add one to the sample")
        if isinstance(row, Invalid):
            return row
        return decode_row(decode, row, f"{location}.{_ROW}", options.text_remedy)
    if isinstance(text, Invalid):
        return text
    if b"\0" in text:
        return Invalid(f"{location}.{_TEXT}: {BINARY.name}; store plain text")
    problem = utf8_problem(text)
    return Invalid(f"{location}.{_TEXT}: {problem}") if problem else text.decode()


def _samples(file: OpenFile, limit: int) -> Iterator[_TarSample]:
    """Group members by key; yields samples without text as well."""
    content = ByteReader(file.blocks)
    sample: _TarSample | None = None
    for member in _members(content, file):
        # WebDataset keys end at the first dot of the file name.
        folder, slash, name = member.name.rpartition("/")
        stem, _, suffix = name.partition(".")
        key = folder + slash + stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _TarSample(key, {})
        padded = -(-member.size // _BLOCK) * _BLOCK  # contents are padded to full blocks
        if suffix not in (_TEXT, _ROW):
            _skip(content, padded, file)
            continue
        if suffix in sample.members:
            raise damaged_file(file, "tar archive", f"two members {member.name}")
        if member.size > limit:
            sample.members[suffix] = Invalid(f"{file.path}: {member.name}: {TOO_LONG}")
            _skip(content, padded, file)
        else:
            sample.members[suffix] = _read_exactly(content, padded, file)[: member.size]
    if sample is not None:
        yield sample


def _members(content: ByteReader, file: OpenFile) -> Iterator[_Member]:
    """Yield the regular members; read or skip a member's content before requesting the next one."""
    # Long names and sizes, from extended headers before the member that they describe.
    overrides: dict[str, str] = {}
    ended = True
    while block := content.read(_BLOCK):
        if not block.strip(b"\0"):
            # Blocks of zeros end an archive; concatenated archives have more members after them.
            ended = True
            continue
        ended = False
        info = _header(block, file)
        if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            overrides |= _pax_records(
                _read_extended_header(content, info, file), file
            )  # pax header of the next member
        elif info.type == tarfile.GNUTYPE_LONGNAME:
            overrides["path"] = (
                _read_extended_header(content, info, file).rstrip(b"\0").decode("utf-8", "replace")
            )
        elif info.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            _read_extended_header(content, info, file)
        else:
            yield from _regular_file(info, overrides, file)
            overrides = {}
    if not ended:
        raise damaged_file(file, "tar archive", "the end-of-archive block is missing")


def _header(block: bytes, file: OpenFile) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError as error:
        raise damaged_file(file, "tar archive", f"invalid header: {error}") from error


def _regular_file(
    info: tarfile.TarInfo, overrides: dict[str, str], file: OpenFile
) -> Iterator[_Member]:
    """Yield a member if it is a regular file; reject links, devices and unsafe paths."""
    name, size = overrides.get("path", info.name), _size(info, overrides, file)
    problem = ""
    if info.type != tarfile.DIRTYPE and info.type not in _FILES:
        problem = "a link or a device"
    elif name.startswith("/") or ".." in name.split("/"):
        problem = "a path outside the archive"
    if problem:
        raise damaged_file(file, "tar archive", f"{name}: {problem}, not allowed in a dataset")
    if info.type != tarfile.DIRTYPE:
        yield _Member(name.removeprefix("./"), size)


def _size(info: tarfile.TarInfo, overrides: dict[str, str], file: OpenFile) -> int:
    size = overrides.get("size", str(info.size))
    if not (size.isascii() and size.isdigit() and len(size) <= 15):
        raise damaged_file(file, "tar archive", f"{info.name}: a size of {size[:40]}")
    return int(size)


def _read_extended_header(content: ByteReader, info: tarfile.TarInfo, file: OpenFile) -> bytes:
    """Read an extended header, which describes the member after it."""
    if not 0 <= info.size <= _HEADER_LIMIT_BYTES:
        raise damaged_file(file, "tar archive", f"{info.name}: a header of {info.size} bytes")
    return _read_exactly(content, -(-info.size // _BLOCK) * _BLOCK, file)[: info.size]


def _pax_records(header: bytes, file: OpenFile) -> dict[str, str]:
    """Parse the records of a pax header, each "LENGTH NAME=VALUE" and a newline."""
    records = {}
    while header:
        length, _, _ = header.partition(b" ")
        valid_length = length.isdigit() and len(length) < 8
        if not (valid_length and len(length) + 3 < int(length) <= len(header)):
            raise damaged_file(file, "tar archive", "a pax header with an invalid record length")
        # The length includes its own digits, the space and the newline.
        record, header = header[: int(length)], header[int(length) :]
        name, _, value = record[len(length) + 1 : -1].partition(b"=")
        records[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return records


def _read_exactly(content: ByteReader, size: int, file: OpenFile) -> bytes:
    block = content.read(size)
    if len(block) != size:
        raise damaged_file(file, "tar archive", "the archive ends inside a member")
    return block


def _skip(content: ByteReader, size: int, file: OpenFile) -> None:
    if content.skip(size) != size:
        raise damaged_file(file, "tar archive", "the archive ends inside a member")


class _TarReader:
    """Claims archives by the magic in their first header, or by name."""

    documents = staticmethod(_documents)

    def claims(self, name: str, head: bytes, /) -> bool:
        """Return whether a file is a tar archive."""
        has_magic = head.startswith(_MAGIC, _MAGIC_OFFSET) and b"\0" in head
        return has_magic or name.lower().endswith(".tar")


READER = _TarReader()
