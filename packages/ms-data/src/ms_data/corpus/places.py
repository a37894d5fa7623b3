"""Says where the files of a corpus lie: on this machine, or wherever fsspec reaches."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib import import_module
from io import BufferedReader, RawIOBase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from attrs import field, frozen

from ms_data.errors import CorpusError, printable

_USER = re.compile(r"(://)[^/?#\s'\"]*@")
_QUERY = re.compile(r"(://[^?\s'\"]*)\?[^\s'\"]*")


class FileInfo(NamedTuple):
    """What is known of a file without reading it."""

    size_bytes: int
    version: str
    """Changes whenever the content does, as far as the place tells; empty if it tells nothing."""
    modified_ns: int | None
    """When it was written; None where the place does not tell."""


@frozen(order=True)
class RemoteFile:
    """A file that fsspec reaches; what it offers is named as `Path` names it."""

    url: str
    """Its address without user, password and query: it is printed, and stored in ledgers."""
    filesystem: Any = field(repr=False, eq=False)
    path: str = field(eq=False)
    """As the filesystem calls it."""
    facts: FileInfo = field(eq=False)
    """As the listing told them."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(without_secrets(self.path)).name

    @property
    def stem(self) -> str:
        """The name without its last suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """The last suffix, with its dot."""
        return PurePosixPath(self.name).suffix


Place = Path | RemoteFile
"""A file of a corpus."""


def open_place(place: Place) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: it cannot be opened.
        CorpusError: it lies elsewhere and cannot be opened.
    """
    if isinstance(place, Path):
        return place.open("rb")
    with reaching(place.url):
        return BufferedReader(_Reached(place.filesystem.open(place.path, "rb"), place.url))


class _Reached(RawIOBase):
    """A file elsewhere, whose client's errors become one line also while it is read."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with reaching(self._url):
            content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        with reaching(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def file_info(place: Place) -> FileInfo:
    """Look up what is known of a file; of one elsewhere, what the listing told."""
    if isinstance(place, RemoteFile):
        return place.facts
    facts = place.stat()
    return FileInfo(facts.st_size, str(facts.st_mtime_ns), facts.st_mtime_ns)


def is_remote(text: str) -> bool:
    """Return whether a corpus is named by its address instead of a path."""
    return "://" in text


def remote_files(url: str) -> tuple[dict[str, RemoteFile], bool]:
    """Find the files at an address, by their paths below it, and whether it is a folder.

    Raises:
        CorpusError: there is nothing, or it cannot be reached.
    """
    shown = without_secrets(url)
    try:
        fsspec = import_module("fsspec")
    except ImportError as error:
        raise CorpusError(
            f"{printable(shown)}: fsspec is needed to reach it; pip install 'ms-data[remote]'"
        ) from error
    with reaching(shown):
        filesystem, root = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        found = filesystem.find(root, detail=True)
        if not (found or filesystem.exists(root)):
            raise FileNotFoundError(root)
        folder = not (len(found) == 1 and root in found)
        # The listings of http and others tell no sizes; files tell their own.
        found = {
            path: facts if isinstance(facts.get("size"), int) else filesystem.info(path)
            for path, facts in found.items()
        }
    base = PurePosixPath(without_secrets(root))
    files = {}
    for path, facts in found.items():
        name = PurePosixPath(without_secrets(path))
        below = str(name.relative_to(base)) if folder else base.name
        address = shown.rstrip("/") + "/" + below if folder else shown
        files[below] = RemoteFile(address, filesystem, path, _facts(address, facts))
    return files, folder


def without_secrets(text: str) -> str:
    """Leave user, password and query out of the addresses in a text: queries hold signatures."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def _facts(url: str, facts: dict[str, Any]) -> FileInfo:
    size = facts.get("size")
    if not isinstance(size, int):
        raise CorpusError(f"{printable(url)}: its size is not known there; copy it to a disk")
    times = (facts.get(name) for name in ("mtime", "LastModified", "last_modified", "created"))
    time = next((one for one in times if one is not None), None)
    seconds = time.timestamp() if isinstance(time, datetime) else time
    known = isinstance(seconds, int | float)
    version = str(facts.get("ETag") or facts.get("etag") or (seconds if known else ""))
    return FileInfo(size, version, int(seconds * 1e9) if known and seconds is not None else None)


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn whatever a store, or its client, raises into one line."""
    try:
        yield
    except CorpusError:
        raise
    except FileNotFoundError as error:
        raise CorpusError(
            f"nothing is found at {printable(url)}; give the address of a file or folder"
        ) from error
    except ImportError as error:
        raise CorpusError(
            f"{printable(url)}: its client is not installed: "
            f"{printable(without_secrets(str(error)))}"
        ) from error
    except Exception as error:  # each store has errors of its own, with no base of theirs
        words = printable(without_secrets(str(error))) or type(error).__name__
        raise CorpusError(
            f"{printable(url)}: cannot be reached: {words}; look at the address and at your access"
        ) from error
