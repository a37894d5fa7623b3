"""Local and remote files of a corpus; remote files are read through fsspec."""

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
    """File metadata, known without reading the file."""

    size_bytes: int
    version: str
    """Version reported by the store, such as an ETag, which changes with the content; or empty."""
    modified_ns: int | None
    """Modification time; None if the store does not report it."""


@frozen(order=True)
class RemoteFile:
    """A file behind fsspec, with the attributes of `Path` that readers use."""

    url: str
    """URL without user, password and query, because it is printed and stored in ledgers."""
    filesystem: Any = field(repr=False, eq=False)
    path: str = field(eq=False)
    """Path inside the file system."""
    info: FileInfo = field(eq=False)
    """Metadata from the listing."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last component of the path."""
        return PurePosixPath(strip_credentials(self.path)).name

    @property
    def stem(self) -> str:
        """Name without its last suffix."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """Last suffix, including the dot."""
        return PurePosixPath(self.name).suffix


CorpusFile = Path | RemoteFile
"""A local or remote file."""


def open_corpus_file(file: CorpusFile) -> BufferedReader:
    """Open a file for reading.

    Raises:
        OSError: a local file cannot be opened.
        CorpusError: a remote file cannot be opened.
    """
    if isinstance(file, Path):
        return file.open("rb")
    with remote_errors(file.url):
        return BufferedReader(_RemoteStream(file.filesystem.open(file.path, "rb"), file.url))


class _RemoteStream(RawIOBase):
    """Raw stream of a remote file that converts the client's errors to `CorpusError`."""

    def __init__(self, file: Any, url: str) -> None:
        self._file, self._url = file, url

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def readinto(self, buffer: Any) -> int:
        with remote_errors(self._url):
            content = self._file.read(len(buffer))  # may be shorter than the buffer
        buffer[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0) -> int:
        with remote_errors(self._url):
            return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def file_info(file: CorpusFile) -> FileInfo:
    """Return a file's size, version and modification time; for remote files, from the listing."""
    if isinstance(file, RemoteFile):
        return file.info
    info = file.stat()
    return FileInfo(info.st_size, str(info.st_mtime_ns), info.st_mtime_ns)


def is_remote(text: str) -> bool:
    """Return whether a corpus name is a URL."""
    return "://" in text


def remote_files(url: str) -> tuple[dict[str, RemoteFile], bool]:
    """List the files at a URL by relative path; also return whether it is a folder.

    Raises:
        CorpusError: nothing exists at the URL, or it cannot be reached.
    """
    safe_url = strip_credentials(url)
    try:
        fsspec = import_module("fsspec")
    except ImportError as error:
        raise CorpusError(
            f"{printable(safe_url)}: fsspec is needed to reach it; pip install 'ms-data[remote]'"
        ) from error
    with remote_errors(safe_url):
        filesystem, root = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()  # a cached listing may be outdated
        entries = filesystem.find(root, detail=True)
        if not (entries or filesystem.exists(root)):
            raise FileNotFoundError(root)
        folder = not (len(entries) == 1 and root in entries)
        # Listings of HTTP and some other stores have no sizes, so files are queried one at a time.
        entries = {
            path: info if isinstance(info.get("size"), int) else filesystem.info(path)
            for path, info in entries.items()
        }
    base = PurePosixPath(strip_credentials(root))
    files = {}
    for path, info in entries.items():
        name = PurePosixPath(strip_credentials(path))
        relative_path = str(name.relative_to(base)) if folder else base.name
        address = safe_url.rstrip("/") + "/" + relative_path if folder else safe_url
        files[relative_path] = RemoteFile(address, filesystem, path, _file_info(address, info))
    return files, folder


def strip_credentials(text: str) -> str:
    """Remove users, passwords and queries from the URLs in a text; queries may hold signatures."""
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def _file_info(url: str, entry: dict[str, Any]) -> FileInfo:
    size = entry.get("size")
    if not isinstance(size, int):
        raise CorpusError(f"{printable(url)}: the store reports no size; copy the file to a disk")
    times = (entry.get(name) for name in ("mtime", "LastModified", "last_modified", "created"))
    time = next((value for value in times if value is not None), None)
    seconds = time.timestamp() if isinstance(time, datetime) else time
    has_time = isinstance(seconds, int | float)
    # Stores with ETags change them with the content; others only have times.
    version = str(entry.get("ETag") or entry.get("etag") or (seconds if has_time else ""))
    return FileInfo(size, version, int(seconds * 1e9) if has_time and seconds is not None else None)


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Convert any error of a store or its client to a one-line `CorpusError`."""
    try:
        yield
    except CorpusError:
        raise
    except FileNotFoundError as error:
        raise CorpusError(f"there is nothing at {printable(url)}; check the URL") from error
    except ImportError as error:
        raise CorpusError(
            f"{printable(url)}: the client library is not installed: "
            f"{printable(strip_credentials(str(error)))}"
        ) from error
    except Exception as error:  # the clients' exceptions have no common base class
        reason = printable(strip_credentials(str(error))) or type(error).__name__
        raise CorpusError(
            f"{printable(url)}: cannot be reached: {reason}; check the URL and your access rights"
        ) from error
