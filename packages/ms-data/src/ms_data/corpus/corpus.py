"""From files to documents, one at a time, in one fixed order."""

import codecs
import gzip
import io
import itertools
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
import zstandard
from attrs import field, frozen

from ms_data.corpus.file_kinds import BINARY, HEAD_BYTES, NotText, foreign_encoding, kind_of
from ms_data.corpus.unpacking import READ_BYTES, lines_of, unpacked
from ms_data.errors import CorpusError, SettingError, TokenizerError, shown

__all__ = ["DOCUMENT_LIMIT_MIB", "Corpus", "Document", "Position", "find_corpus"]

DOCUMENT_LIMIT_MIB = 16
"""A document of text of this size takes some 2 GB while it is tokenized."""

_LINES_SUFFIXES = (".jsonl", ".ndjson")
_BYTE_ORDER_MARK = "\ufeff"
_TOO_LONG = (
    "longer than the largest document that is read; split it, or raise --document-limit-mib, for "
    "some 130 times as much memory"
)
_TOO_DEEP = "its JSON is nested too deeply; mend the line"
_LIBRARY_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


class Position(NamedTuple):
    """How far a corpus has been read."""

    file: int = 0
    """Files before this one are done."""
    documents: int = 0
    """Documents, skipped ones included, done of this file."""


class Document(NamedTuple):
    """One text and where the next one starts."""

    text: str
    after: Position
    read_bytes: int
    """Bytes of the corpus read so far, compressed ones as they lie on disk."""


class Invalid(NamedTuple):
    """Stands in for a document that cannot be read."""

    reason: str


@frozen(kw_only=True)
class Corpus:
    """The files to read and how."""

    name: str
    """What the user typed."""
    files: tuple[Path, ...]
    """In the order of reading."""
    text_key: str = "text"
    """The member of a JSON line that holds the text."""
    skip_invalid: bool = False
    """Leave out what cannot be read instead of stopping."""
    python_sources: bool = False
    """Files are Python sources, which may declare their encoding."""
    parse: Callable[[bytes], str] | None = None
    """Makes a document's text of a JSON line, or raises ValueError; None takes `text_key`."""
    document_limit_bytes: int = DOCUMENT_LIMIT_MIB << 20
    """A longer document, or line, is not valid."""
    named: bool = False
    """The one file was named itself, so that it must be text."""
    root: Path = Path()
    """The folder that all files lie in."""
    sizes_bytes: tuple[int, ...] = field(init=False)
    """Size of each file."""

    @sizes_bytes.default
    def _measure(self) -> tuple[int, ...]:
        return tuple(path.stat().st_size for path in self.files)

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(self.sizes_bytes)

    def identity(self, count: int) -> str:
        """Hexadecimal xxh3-128 of the names, sizes and times of the first `count` files."""
        seen = xxhash.xxh3_128()
        for path in self.files[:count]:
            facts = path.stat()
            # A name need not be UTF-8.
            seen.update(os.fsencode(path) + f"\0{facts.st_size} {facts.st_mtime_ns}\0".encode())
        return seen.hexdigest()

    @property
    def listing(self) -> str:
        """Hexadecimal xxh3-128 of the files' names below the root and their sizes."""
        seen = xxhash.xxh3_128()
        for path, size in zip(self.files, self.sizes_bytes, strict=True):
            seen.update(os.fsencode(os.path.relpath(path, self.root)) + f"\0{size}\0".encode())
        return seen.hexdigest()

    def content(self) -> str:
        """Hexadecimal xxh3-128 of every byte of every file; reads them all, on all cores."""
        seen = xxhash.xxh3_128()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for checksum in pool.map(_checksum_of, self.files):
                seen.update(checksum)
        return seen.hexdigest()

    def changed_since(self, time_ns: int) -> Path | None:
        """The first file that was written after `time_ns`, if there is one."""
        return next((path for path in self.files if path.stat().st_mtime_ns > time_ns), None)

    def documents(
        self,
        start: Position = Position(),  # noqa: B008 - an immutable value
        on_skip: Callable[[str], None] = lambda reason: None,
        on_leave_out: Callable[[str], None] = lambda kind: None,
    ) -> Iterator[Document]:
        """Reads on from `start`; texts that are empty are passed over.

        Of a folder, files that are no text are left out, and `on_leave_out` hears what they are.

        Raises:
            CorpusError: a file cannot be read, the one that was named is no text, or a document
                is not valid text and `skip_invalid` is off. Otherwise `on_skip` hears the reason.
        """
        done_bytes = sum(self.sizes_bytes[: start.file])
        for number in range(start.file, len(self.files)):
            skip = start.documents if number == start.file else 0
            for nth, (text, read_bytes) in enumerate(self._file(self.files[number]), 1):
                if nth <= skip:
                    continue
                if isinstance(text, NotText):
                    if self.named:
                        raise CorpusError(
                            f"{self.files[number]}: {text.name}, which is not read as text; "
                            f"{text.remedy}"
                        )
                    on_leave_out(text.name)
                elif isinstance(text, Invalid):
                    if not self.skip_invalid:
                        raise CorpusError(f"{text.reason}, or leave it out with --skip-invalid")
                    on_skip(text.reason)
                elif text:
                    yield Document(text, Position(number, nth), done_bytes + read_bytes)
            done_bytes += self.sizes_bytes[number]

    def _file(self, path: Path) -> Iterator[tuple[str | Invalid | NotText, int]]:
        """Each document of a file, with the bytes of the file read so far."""
        name, _, suffix = path.name.rpartition(".")
        inner = name if suffix in ("gz", "zst") else path.name
        try:
            with path.open("rb") as raw:
                head = raw.peek(HEAD_BYTES)[:HEAD_BYTES]
                if reason := foreign_encoding(head):
                    yield Invalid(f"{path}: {reason}"), raw.tell()
                    return
                kind = kind_of(head)
                if isinstance(kind, str) and suffix in ("gz", "zst"):
                    kind = suffix  # or what is said to be packed, and is not, would be read
                if isinstance(kind, NotText):
                    yield kind, raw.tell()
                    return
                for text in self._texts(path, inner, unpacked(raw, kind)):
                    yield text, raw.tell()
        except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
            raise CorpusError(
                f"{path}: damaged compressed file ({error}); fetch or compress it again"
            ) from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _texts(
        self, path: Path, inner: str, blocks: Iterator[bytes]
    ) -> Iterator[str | Invalid | NotText]:
        """Each document of what a file holds once it is unpacked; `inner` is its name then."""
        first = next(blocks, b"")
        blocks = itertools.chain([first], blocks)
        if reason := foreign_encoding(first):
            yield Invalid(f"{path}: {reason}")
            return
        kind = kind_of(first[:HEAD_BYTES])
        if kind:  # packed twice, or an archive that is packed
            yield kind if isinstance(kind, NotText) else NotText("file packed twice", "unpack it")
        elif inner.endswith(_LINES_SUFFIXES):
            lines = lines_of(blocks, self.document_limit_bytes)
            if self.parse is None:
                yield from _json_lines(path, lines, self.text_key)
            else:
                yield from _parsed_lines(path, lines, self.parse)
        elif self.parse is not None:
            raise CorpusError(
                f"{path}: not JSON Lines; give files that end in .jsonl with a row a line "
                "(an array becomes that with `jq -c '.[]'`)"
            )
        else:
            yield self._document(path, inner, blocks)

    def _document(self, path: Path, inner: str, blocks: Iterator[bytes]) -> str | Invalid | NotText:
        """The one document of a file of text."""
        parts: list[bytes] = []
        left = self.document_limit_bytes
        for block in blocks:
            parts.append(block)
            left -= len(block)
            if left < 0:
                return Invalid(f"{path}: {_TOO_LONG}")
        content = b"".join(parts)
        if self.python_sources:
            return _decode_python(path, content)
        if b"\0" in content:
            return BINARY
        row = dict[str, Any] if self.named else _row_type(self.text_key)
        if inner.endswith(".json") and (rows := _rows_of(content, row)):
            return Invalid(f"{path} holds {rows}")
        return _decode(path, content)


def find_corpus(
    corpus: str | Path,
    *,
    text_key: str = "text",
    skip_invalid: bool = False,
    parse: Callable[[bytes], str] | None = None,
    document_limit_mib: int = DOCUMENT_LIMIT_MIB,
) -> Corpus:
    """The corpus that `corpus` names: a file, a folder of files, or `stdlib`.

    Files that end in .jsonl or .ndjson hold a document a line, any other file is one document;
    both may be packed by gzip (.gz) or zstd (.zst). A folder is read in the order of its files'
    names, hidden ones left out and links followed, each folder once; files that are no text
    (archives, pictures, programs, whatever holds NUL bytes) are left out when they are read.
    `stdlib` means the running Python's own library sources.

    Raises:
        SettingError: the limit is below 1.
        CorpusError: there is no such place, no file in it, or a link to nothing.
    """
    if document_limit_mib < 1:
        raise SettingError(f"document_limit_mib is {document_limit_mib}; it must be 1 or more")
    try:
        library = str(corpus) == "stdlib" and not Path(corpus).exists()
        named = Path(corpus).is_file()
        if library:
            files = _library_files()
        elif Path(corpus).is_dir():
            files = _visible_files(Path(corpus))
        elif named:
            files = [Path(corpus)]
        else:
            raise CorpusError(f"no file or folder {shown(corpus)}; give a path, or `stdlib`")
    except (OSError, ValueError) as error:
        if isinstance(error, CorpusError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{shown(corpus)}: cannot be read: {reason}; give a path") from error
    if not files:
        raise CorpusError(f"{corpus} is empty: it holds no files to read; give a folder of text")
    # Python's own tests hold sources that are broken on purpose.
    return Corpus(
        name=str(corpus),
        files=tuple(files),
        text_key=text_key,
        skip_invalid=skip_invalid or library,
        python_sources=library,
        parse=parse,
        document_limit_bytes=document_limit_mib << 20,
        named=named,
        root=_root_of(Path(corpus), library=library),
    )


def _checksum_of(path: Path) -> bytes:
    seen = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                seen.update(block)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error
    return seen.digest()


def _root_of(corpus: Path, *, library: bool) -> Path:
    if library:
        return Path(sysconfig.get_path("stdlib"))
    return corpus if corpus.is_dir() else corpus.parent


def _visible_files(folder: Path) -> list[Path]:
    """Links to folders come last, so that what lies in the corpus itself keeps its own name."""
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        for place, folders, names in os.walk(waiting.pop(0), onerror=_refuse):
            facts = os.stat(place)
            if (facts.st_dev, facts.st_ino) in seen:
                folders.clear()
                continue
            seen.add((facts.st_dev, facts.st_ino))
            inner = sorted(Path(place, name) for name in folders if not name.startswith("."))
            waiting += [path for path in inner if path.is_symlink()]
            folders[:] = [path.name for path in inner if not path.is_symlink()]
            found += [Path(place, name) for name in names if not name.startswith(".")]
    for path in found:
        if path.is_symlink() and not path.exists():
            raise CorpusError(f"{path}: a link to nothing; mend or remove it")
    return sorted(path for path in found if path.is_file())


def _refuse(error: OSError) -> None:
    raise CorpusError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _library_files() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    found = []
    for place, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in _LIBRARY_LEFT_OUT]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    return sorted(found)


def _json_lines(path: Path, lines: Iterator[bytes | None], key: str) -> Iterator[str | Invalid]:
    decoder = msgspec.json.Decoder(_row_type(key))

    def parse(line: bytes) -> str:
        text: str = decoder.decode(line).text
        text.encode()
        return text

    return _parsed_lines(path, lines, parse, "; name the text's key with --text-key")


def _parsed_lines(
    path: Path, lines: Iterator[bytes | None], parse: Callable[[bytes], str], remedy: str = ""
) -> Iterator[str | Invalid]:
    for number, line in enumerate(lines, 1):
        place = f"{path}:{number}"
        if line is None:
            yield Invalid(f"{place}: {_TOO_LONG}")
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            yield ""
            continue
        try:
            yield parse(line)
        except TokenizerError as error:  # of the template, not of the row: nothing to leave out
            raise TokenizerError(f"{place}: {error}") from error
        except msgspec.ValidationError as error:
            yield Invalid(f"{place}: {error}{remedy}")
        except (msgspec.DecodeError, UnicodeError) as error:
            reason = _not_utf8(line) or f"malformed JSON line: {error}; mend the line"
            yield Invalid(f"{place}: {reason}")
        except ValueError as error:
            yield Invalid(f"{place}: {error}")
        except RecursionError:
            yield Invalid(f"{place}: {_TOO_DEEP}")


def _row_type(key: str) -> Any:
    return msgspec.defstruct("Row", [("text", str, msgspec.field(name=key))])


def _rows_of(content: bytes, kind: Any) -> str | None:
    """Why a file of JSON is no document but rows, or None if it is one document."""
    body = content.removeprefix(codecs.BOM_UTF8).strip()
    try:
        if body.startswith(b"["):
            if msgspec.json.decode(body, type=list[kind]):
                return "an array of rows; make a row a line of it with `jq -c '.[]'`, named .jsonl"
        elif b"\n" in body:
            for line in body.split(b"\n", 2)[:2]:
                msgspec.json.decode(line, type=kind)
            return "a JSON object a line; name it .jsonl"
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return None


def _not_utf8(content: bytes) -> str | None:
    """Why some bytes are not UTF-8, or None if they are."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        byte = content[error.start]
        return f"not UTF-8: byte 0x{byte:02x} at offset {error.start}; convert the file to UTF-8"
    return None


def _decode(path: Path, content: bytes) -> str | Invalid:
    try:
        return content.decode().removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError:
        return Invalid(f"{path}: {_not_utf8(content)}")


def _decode_python(path: Path, content: bytes) -> str | Invalid:
    """Decodes a Python source as the interpreter would, by its encoding cookie."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError) as error:
        return Invalid(f"{path}: {error}")
