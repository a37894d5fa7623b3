"""Reads WebDataset archives: members that share a name up to its first dot are one sample.

A sample's text is its .txt member, else its .json member, which is a row. Members are read in
order, whole or not at all; nothing is ever written, and a name only tells what belongs together.
"""

import tarfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

from attrs import define

from ms_data.corpus.file_kinds import BINARY, NotText
from ms_data.corpus.reader import (
    TOO_LONG,
    Found,
    Invalid,
    OpenFile,
    ReadOptions,
    damaged,
    not_utf8,
)
from ms_data.corpus.readers.json_lines import decoded, json_decoder
from ms_data.corpus.unpacking import Content

_BLOCK = tarfile.BLOCKSIZE
_MARK, _MARK_AT = b"ustar", 257
_HEADER_LIMIT_BYTES = 1 << 20
"""A name, or what else is said of a member, is never longer."""

_TEXT, _ROW = "txt", "json"
_FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_NO_TEXT = NotText("tar archive without .txt or .json", "unpack it and give the folder")


class _Member(NamedTuple):
    name: str
    size: int


@define
class _Sample:
    """Members that share a key, one after the other."""

    key: str
    members: dict[str, bytes | Invalid]
    """What is read of them, by the rest of their names."""


def _documents(file: OpenFile, options: ReadOptions, start: int) -> Iterator[Found]:
    decode = json_decoder(options)
    for number, sample in enumerate(_samples(file, options.document_limit_bytes)):
        if not number and not sample.members:
            yield from [_NO_TEXT][start:]
            return
        if number >= start:
            yield _document(sample, f"{file.path}: {sample.key}", options, decode)


def _document(
    sample: _Sample, place: str, options: ReadOptions, decode: Callable[[bytes, str], Found]
) -> Found:
    text = sample.members.get(_TEXT)
    if text is None or options.parse is not None:
        row = sample.members.get(_ROW)
        if row is None:
            wanted = ".json" if options.parse else ".txt or .json"
            return Invalid(f"{place}: no member {wanted}; name the text so")
        if isinstance(row, Invalid):
            return row
        return decoded(decode, row, f"{place}.{_ROW}", options.text_remedy)
    if isinstance(text, Invalid):
        return text
    if b"\0" in text:
        return Invalid(f"{place}.{_TEXT}: {BINARY.name}; give text")
    problem = not_utf8(text)
    return Invalid(f"{place}.{_TEXT}: {problem}") if problem else text.decode()


def _samples(file: OpenFile, limit: int) -> Iterator[_Sample]:
    """Gather the members of each sample; a sample without text is one all the same."""
    content = Content(file.blocks)
    sample: _Sample | None = None
    for member in _members(content, file):
        folder, slash, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        key = folder + slash + stem
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = _Sample(key, {})
        padded = -(-member.size // _BLOCK) * _BLOCK
        if kind not in (_TEXT, _ROW):
            _skip(content, padded, file)
            continue
        if kind in sample.members:
            raise damaged(file, "tar archive", f"two members {member.name}")
        if member.size > limit:
            sample.members[kind] = Invalid(f"{file.path}: {member.name}: {TOO_LONG}")
            _skip(content, padded, file)
        else:
            sample.members[kind] = _exactly(content, padded, file)[: member.size]
    if sample is not None:
        yield sample


def _members(content: Content, file: OpenFile) -> Iterator[_Member]:
    """Yield each regular member; its content must be read before the next one is asked for."""
    more: dict[str, str] = {}
    ended = True
    while block := content.read(_BLOCK):
        if not block.strip(b"\0"):
            ended = True
            continue
        ended = False
        info = _header(block, file)
        if info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            more |= _records(_said(content, info, file), file)
        elif info.type == tarfile.GNUTYPE_LONGNAME:
            more["path"] = _said(content, info, file).rstrip(b"\0").decode("utf-8", "replace")
        elif info.type in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            _said(content, info, file)
        else:
            yield from _checked(info, more, file)
            more = {}
    if not ended:
        raise damaged(file, "tar archive", "it ends without its mark of an end")


def _header(block: bytes, file: OpenFile) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "replace")
    except tarfile.HeaderError as error:
        raise damaged(file, "tar archive", f"a header: {error}") from error


def _checked(info: tarfile.TarInfo, more: dict[str, str], file: OpenFile) -> Iterator[_Member]:
    """Return a member if it is a file; refuse what is no part of a data set."""
    name, size = more.get("path", info.name), _size(info, more, file)
    problem = ""
    if info.type != tarfile.DIRTYPE and info.type not in _FILES:
        problem = "a link or a device"
    elif name.startswith("/") or ".." in name.split("/"):
        problem = "a path that leads out of it"
    if problem:
        raise damaged(file, "tar archive", f"{name}: {problem}, which no data set holds")
    if info.type != tarfile.DIRTYPE:
        yield _Member(name.removeprefix("./"), size)


def _size(info: tarfile.TarInfo, more: dict[str, str], file: OpenFile) -> int:
    said = more.get("size", str(info.size))
    if not (said.isascii() and said.isdigit() and len(said) <= 15):
        raise damaged(file, "tar archive", f"{info.name}: a size of {said[:40]}")
    return int(said)


def _said(content: Content, info: tarfile.TarInfo, file: OpenFile) -> bytes:
    """Read what a member says of the one after it."""
    if not 0 <= info.size <= _HEADER_LIMIT_BYTES:
        raise damaged(file, "tar archive", f"{info.name}: a header of {info.size} bytes")
    return _exactly(content, -(-info.size // _BLOCK) * _BLOCK, file)[: info.size]


def _records(said: bytes, file: OpenFile) -> dict[str, str]:
    """Read the records of a pax header, each its length, a name and a value."""
    found = {}
    while said:
        length, _, _ = said.partition(b" ")
        known = length.isdigit() and len(length) < 8
        if not (known and len(length) + 3 < int(length) <= len(said)):
            raise damaged(file, "tar archive", "a header whose parts have no length")
        record, said = said[: int(length)], said[int(length) :]
        name, _, value = record[len(length) + 1 : -1].partition(b"=")
        found[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return found


def _exactly(content: Content, size: int, file: OpenFile) -> bytes:
    found = content.read(size)
    if len(found) != size:
        raise damaged(file, "tar archive", "it ends inside a member")
    return found


def _skip(content: Content, size: int, file: OpenFile) -> None:
    if content.skip(size) != size:
        raise damaged(file, "tar archive", "it ends inside a member")


class _TarReader:
    """Reads archives, which are known by a mark inside their first header, or their name."""

    documents = staticmethod(_documents)

    def claims(self, name: str, head: bytes, /) -> bool:
        """Return whether a file is an archive."""
        marked = head.startswith(_MARK, _MARK_AT) and b"\0" in head
        return marked or name.endswith(".tar")


READER = _TarReader()
