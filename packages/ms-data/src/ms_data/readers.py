"""From files to documents, one at a time, in one fixed order."""

import codecs
import gzip
import io
import os
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
import zstandard
from attrs import field, frozen

from ms_data.errors import CorpusError, TokenizerError

__all__ = ["Corpus", "Document", "Position", "find_corpus"]

READ_BYTES = 1 << 20
_LINES_SUFFIXES = (".jsonl", ".ndjson")
_BYTE_ORDER_MARK = "\ufeff"
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

    def documents(
        self,
        start: Position = Position(),  # noqa: B008 - an immutable value
        on_skip: Callable[[str], None] = lambda reason: None,
    ) -> Iterator[Document]:
        """Reads on from `start`; texts that are empty are passed over.

        Raises:
            CorpusError: a file cannot be read, or a document is not valid text and
                `skip_invalid` is off. Otherwise `on_skip` hears the reason.
        """
        done_bytes = sum(self.sizes_bytes[: start.file])
        for number in range(start.file, len(self.files)):
            skip = start.documents if number == start.file else 0
            for nth, (text, read_bytes) in enumerate(self._file(self.files[number]), 1):
                if nth <= skip:
                    continue
                if isinstance(text, Invalid):
                    if not self.skip_invalid:
                        raise CorpusError(f"{text.reason}, or leave it out with --skip-invalid")
                    on_skip(text.reason)
                elif text:
                    yield Document(text, Position(number, nth), done_bytes + read_bytes)
            done_bytes += self.sizes_bytes[number]

    def _file(self, path: Path) -> Iterator[tuple[str | Invalid, int]]:
        """Each document of a file, with the bytes of the file read so far."""
        name, _, packing = path.name.rpartition(".")
        packing = packing if packing in ("gz", "zst") else ""
        inner = name if packing else path.name
        try:
            with path.open("rb") as raw:
                blocks = _unpacked(raw, packing)
                if inner.endswith(_LINES_SUFFIXES):
                    rows = (
                        _json_lines(path, blocks, self.text_key)
                        if self.parse is None
                        else _parsed_lines(path, blocks, self.parse)
                    )
                    for text in rows:
                        yield text, raw.tell()
                elif self.parse is not None:
                    raise CorpusError(
                        f"{path}: not JSON Lines; give files that end in .jsonl with a row a line "
                        "(an array becomes that with `jq -c '.[]'`)"
                    )
                else:
                    content = b"".join(blocks)
                    decode = _decode_python if self.python_sources else _decode
                    yield decode(path, content), raw.tell()
        except (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError) as error:
            raise CorpusError(
                f"{path}: damaged compressed file ({error}); fetch or compress it again"
            ) from error
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error


def find_corpus(
    corpus: str | Path,
    *,
    text_key: str = "text",
    skip_invalid: bool = False,
    parse: Callable[[bytes], str] | None = None,
) -> Corpus:
    """The corpus that `corpus` names: a file, a folder of files, or `stdlib`.

    Files that end in .jsonl or .ndjson hold a document a line, any other file is one document;
    both may be packed by gzip (.gz) or zstd (.zst). A folder is read in the order of its files'
    names, hidden ones left out and links followed, each folder once. `stdlib` means the running
    Python's own library sources.

    Raises:
        CorpusError: there is no such place, no file in it, or a link to nothing.
    """
    library = str(corpus) == "stdlib" and not Path(corpus).exists()
    if library:
        files = _library_files()
    elif Path(corpus).is_dir():
        files = _visible_files(Path(corpus))
    elif Path(corpus).is_file():
        files = [Path(corpus)]
    else:
        raise CorpusError(f"no file or folder {corpus}; give a path, or `stdlib`")
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
    )


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


def _unpacked(raw: io.BufferedReader, packing: str) -> Iterator[bytes]:
    """The content of an open file in blocks."""
    if packing == "zst":
        yield from _unpacked_zstd(raw)
        return
    file: Any = gzip.GzipFile(fileobj=raw) if packing == "gz" else raw
    while block := file.read(READ_BYTES):
        yield block


def _unpacked_zstd(raw: io.BufferedReader) -> Iterator[bytes]:
    """Like zstandard's own reader, but a file that ends inside a frame is an error."""
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    fresh = True
    while block := raw.read(READ_BYTES // 16):
        while block:
            fresh = False
            yield unpacker.decompress(block)
            block = unpacker.unused_data if unpacker.eof else b""
            if unpacker.eof:
                unpacker = zstandard.ZstdDecompressor().decompressobj()
                fresh = True
    if not fresh:
        raise EOFError("it ends inside a zstd frame")


def _lines(blocks: Iterator[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for block in blocks:
        *whole, last = block.split(b"\n")
        if whole:
            yield b"".join((*rest, whole[0]))
            yield from whole[1:]
            rest = []
        rest.append(last)
    if tail := b"".join(rest):
        yield tail


def _json_lines(path: Path, blocks: Iterator[bytes], key: str) -> Iterator[str | Invalid]:
    row = msgspec.defstruct("Row", [("text", str, msgspec.field(name=key))])
    decoder = msgspec.json.Decoder(row)
    for number, line in enumerate(_lines(blocks), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            yield ""
            continue
        try:
            text: str = decoder.decode(line).text  # type: ignore[attr-defined]
            text.encode()
            yield text
        except msgspec.ValidationError as error:
            yield Invalid(f"{path}:{number}: {error}; name the text's key with --text-key")
        except (msgspec.DecodeError, UnicodeError) as error:
            reason = _not_utf8(line) or f"malformed JSON line: {error}; mend the line"
            yield Invalid(f"{path}:{number}: {reason}")
        except RecursionError:
            yield Invalid(f"{path}:{number}: {_TOO_DEEP}")


def _parsed_lines(
    path: Path, blocks: Iterator[bytes], parse: Callable[[bytes], str]
) -> Iterator[str | Invalid]:
    for number, line in enumerate(_lines(blocks), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            yield ""
            continue
        try:
            yield parse(line)
        except TokenizerError as error:  # of the template, not of the row: nothing to leave out
            raise TokenizerError(f"{path}:{number}: {error}") from error
        except msgspec.DecodeError as error:
            reason = _not_utf8(line) or f"malformed JSON line: {error}; mend the line"
            yield Invalid(f"{path}:{number}: {reason}")
        except ValueError as error:
            yield Invalid(f"{path}:{number}: {error}")
        except RecursionError:
            yield Invalid(f"{path}:{number}: {_TOO_DEEP}")


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
