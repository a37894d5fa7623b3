"""Shards in object stores, read in blocks through fsspec with a bounded cache on the local disk.

The index and the shards are addressed by name, so nothing is listed. A shard is read in aligned
blocks by range requests; blocks are cached as files that all processes of a machine share. Stores
fail, stall and truncate transfers, so requests are retried with backoff, and each answer must have
the requested length. Bytes are only trusted after the checks of `Shard`, whose frames have xxh3
checksums: a frame that fails is fetched again, bypassing the cache.
"""

import logging
import os
import random
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import xxhash

from ms_data.arguments import shown
from ms_data.disk.format import decode_index
from ms_data.errors import DamageError, RemoteError, SettingError, printable
from ms_data.files.durable import write_file, writing
from ms_data.files.untrusted import check_path
from ms_data.secret_text import without_secrets
from ms_data.settings.arguments import check_counts

logger = logging.getLogger(__name__)

BLOCK_KIB = 1024
"""Request size; a stream reads neighboring frames of about this size together."""
CACHE_MIB = 4096
ATTEMPTS = 8
TIMEOUT_S = 30.0
PAUSE_S, MAX_PAUSE_S = 0.1, 10.0
THREADS = 8
"""Requests in flight per process."""
INDEX_LIMIT_BYTES = 1 << 28
"""Enough for more than a million shards."""
READS = 4
"""Attempts to read a small file whose bytes do not match its checksum."""
DESCRIPTION = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "build.json")
"""Files of a dataset folder next to its index and shards; all but the first are optional."""
TRIM_DIVISOR = 16
"""A process trims the cache after adding 1 / `TRIM_DIVISOR` of its limit."""


class RemoteShards:
    """A dataset folder in an object store, for any argument that takes a folder of shards.

    Args:
        url: `s3://`, `gs://`, `hf://` or another URL of fsspec, of a folder that `build` wrote.
            Credentials come from the client's environment and are never printed or stored.
        cache: local folder of cached blocks. None: `ms-data` in `XDG_CACHE_HOME` or `~/.cache`.
        cache_mib: limit of the cache on this machine, in MiB.
        block_kib: size of a cached block and a request, in KiB.
        attempts: requests for a block before it counts as failed.
        timeout_s: limit of one request in seconds, for asynchronous clients (s3, gs, http).
        options: options of the fsspec file system, such as `endpoint_url`.

    Raises:
        SettingError: an argument is out of range, or fsspec or the client is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        cache: str | Path | None = None,
        cache_mib: int = CACHE_MIB,
        block_kib: int = BLOCK_KIB,
        attempts: int = ATTEMPTS,
        timeout_s: float = TIMEOUT_S,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_path("cache", cache, error=SettingError, optional=True)
        if not isinstance(url, str) or "://" not in url:
            raise SettingError(
                f"url must be a URL such as s3://bucket/folder, got {shown(url)}; pass one"
            )
        check_counts(cache_mib=cache_mib, block_kib=block_kib, attempts=attempts)
        parts = urlsplit(url)
        self.url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        """URL without user, password and query."""
        self.attempts, self.timeout_s = attempts, timeout_s
        self.block_bytes = block_kib << 10
        self.retries = 0
        """Number of retries by this process."""
        self._url, self._options = url, options or {}
        self._filesystem, self._root = self._connect()
        self._cache = BlockCache(_cache_folder(cache), cache_mib << 20)
        self._process = os.getpid()

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """Last component of the URL."""
        return PurePosixPath(urlsplit(self.url).path).name or self.url

    def path(self, name: str) -> str:
        """Return the URL of a file, for messages."""
        return f"{self.url.rstrip('/')}/{name}"

    def read_index(self) -> bytes:
        """Read and check `index.json`, usually with one request.

        Raises:
            SettingError: the folder has no index.
            DamageError: the index is damaged.
            RemoteError: the store does not answer.
        """
        content = self.read_index_if_present()
        if content is None:
            raise SettingError(
                f"{printable(self.url)} holds no dataset (no index.json); build one and copy it"
            )
        return content

    def read_index_if_present(self) -> bytes | None:
        """Read and check `index.json`, usually with one request; None if the folder has none.

        Raises:
            DamageError: the index is damaged.
            RemoteError: the store does not answer.
        """
        content, problem = b"", ""
        for _ in range(READS):
            try:
                content = self._request("index.json", None, None)
                if len(content) > INDEX_LIMIT_BYTES:
                    problem = f"has {len(content)} bytes, too large for an index"
                    break
                decode_index(content)  # checks its digest
                return content
            except FileNotFoundError:
                return None
            except RecursionError:
                problem = "is nested too deeply"
            except (ValueError, OverflowError) as error:
                problem = printable(error)
        raise DamageError(self.path("index.json"), "index", problem)

    def copy_description(self, folder: str | Path) -> None:
        """Copy index, tokenizer and build record to a local folder; the shards stay in the store.

        `inspect` and `Tokenizer.load` take the folder; a stream takes this object.

        Raises:
            SettingError: the URL has no dataset.
            RemoteError: the store does not answer.
            WriteError: the folder cannot be written.
        """
        check_path("folder", folder, error=SettingError, written="folder")
        index = self.read_index()
        expected = decode_index(index).tokenizer
        with writing(Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
        for name in DESCRIPTION:
            for _ in range(READS):
                try:
                    content = self._request(name, None, None)
                except FileNotFoundError:
                    content = b""
                # A tokenizer still wrong after the last attempt is reported when it is loaded.
                if name != DESCRIPTION[0] or xxhash.xxh3_128_hexdigest(content) == expected:
                    break
            if not content:
                continue
            with writing(Path(folder) / name):
                write_file(Path(folder) / name, content)
        # Last, as the folder is a dataset once it has an index.
        with writing(Path(folder) / "index.json"):
            write_file(Path(folder) / "index.json", index)

    def open(self, name: str, size_bytes: int, fingerprint: str) -> "RemoteFile":
        """Return a file of a known size; no request is made."""
        return RemoteFile(self, name, size_bytes, fingerprint)

    def fetch(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes from `begin` to `end` of a file from the store, with retries.

        Raises:
            RemoteError: all attempts failed.
            FileNotFoundError: the file does not exist.
        """
        return self._request(name, begin, end)

    def _request(self, name: str, begin: int | None, end: int | None) -> bytes:
        path = f"{self._root.rstrip('/')}/{name}"
        problem = ""
        for attempt in range(self.attempts):
            if attempt:
                self.retries += 1
                # Exponential backoff with jitter, so that processes do not retry in lockstep.
                pause = min(PAUSE_S * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.5)
                logger.debug("%s: %s; trying again in %.1f s", self.path(name), problem, pause)
                time.sleep(pause)
            try:
                content = self._cat(path, begin, end)
            except FileNotFoundError:  # final: retries would not help
                raise
            except Exception as error:  # clients have no common exception class
                problem = without_secrets(f"{type(error).__name__}: {error}")
                continue
            if begin is None or end is None or len(content) == end - begin:
                return content
            problem = f"sent {len(content)} of {end - begin} bytes"
        raise RemoteError(
            f"{printable(self.path(name))}: no complete answer in {self.attempts} attempts,"
            f" last {printable(problem)[:200]}; check the store and your access rights"
        )

    def _cat(self, path: str, begin: int | None, end: int | None) -> bytes:
        filesystem = self._filesystem_of_process()
        if getattr(filesystem, "async_impl", False):
            sync = import_module("fsspec.asyn").sync
            read = filesystem._cat_file
            # `cat_file` has no timeout, and clients wait for minutes before they give up on a
            # stalled answer. `sync` with the coroutine has one.
            return bytes(
                sync(filesystem.loop, read, path, start=begin, end=end, timeout=self.timeout_s)
            )
        return bytes(filesystem.cat_file(path, start=begin, end=end))

    def _filesystem_of_process(self) -> Any:
        if self._process != os.getpid():  # a client's threads do not survive a fork
            self._filesystem, self._root = self._connect()
            self._process = os.getpid()
        return self._filesystem

    def _connect(self) -> tuple[Any, str]:
        try:
            fsspec = import_module("fsspec")
        except ImportError as error:
            raise SettingError(
                f"{printable(self.url)}: fsspec is needed to reach it; pip install"
                " 'ms-data[remote]'"
            ) from error
        try:
            # Not from fsspec's cache, which after a fork returns the parent's client.
            filesystem, root = fsspec.core.url_to_fs(
                self._url, skip_instance_cache=True, **self._options
            )
        except (ImportError, ValueError) as error:
            raise SettingError(
                f"{printable(self.url)}: {printable(str(error))}; install the client of this store"
            ) from error
        return filesystem, str(root)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the client: each process opens its own connection."""
        return {**self.__dict__, "_filesystem": None, "_process": 0}


class RemoteFile:
    """Reads byte ranges of one file through the cache.

    Args:
        folder: folder of the file.
        name: name of the file.
        size_bytes: size from the index.
        fingerprint: identifies the dataset's version, so the cache never mixes two versions.
    """

    def __init__(self, folder: RemoteShards, name: str, size_bytes: int, fingerprint: str) -> None:
        self.folder, self.name, self.size_bytes = folder, name, size_bytes
        # Everything that could change a block's bytes. Hashed, as URLs are not file names.
        key = f"{folder.url}\0{fingerprint}\0{name}\0{size_bytes}\0{folder.block_bytes}"
        self._key = blake2b(key.encode(), digest_size=16).hexdigest()

    def read(self, begin: int, end: int, *, fresh: bool = False) -> bytes:
        """Read bytes from `begin` to `end`; `fresh` bypasses and updates the cache.

        Raises:
            RemoteError: the store does not answer completely.
            FileNotFoundError: the file does not exist.
        """
        size = self.folder.block_bytes
        # Each block contributes its part of [begin, end), relative to the block's start.
        return b"".join(
            self._read_block(
                number, max(begin - number * size, 0), min(end - number * size, size), fresh=fresh
            )
            for number in self._blocks(begin, end)
        )

    def prefetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch the missing blocks of byte ranges in parallel."""
        # A single block is left to `read`, which would fetch it just as fast.
        blocks = {number for begin, end in spans for number in self._blocks(begin, end)}
        missing = [n for n in sorted(blocks) if not self.folder._cache.has(self._name(n))]
        if len(missing) > 1:
            with ThreadPoolExecutor(min(THREADS, len(missing))) as pool:
                list(pool.map(self._fetch_block, missing))

    def _blocks(self, begin: int, end: int) -> range:
        size = self.folder.block_bytes
        return range(begin // size, -(-end // size))

    def _name(self, number: int) -> str:
        return f"{self._key}-{number}"

    def _read_block(self, number: int, begin: int, end: int, *, fresh: bool) -> bytes:
        """Read a range of a block, from the cache if possible."""
        content = None if fresh else self.folder._cache.get(self._name(number), begin, end)
        return self._fetch_block(number)[begin:end] if content is None else content

    def _fetch_block(self, number: int) -> bytes:
        # The last block of a file may be shorter.
        begin = number * self.folder.block_bytes
        end = min(begin + self.folder.block_bytes, self.size_bytes)
        content = self.folder.fetch(self.name, begin, end)
        self.folder._cache.put(self._name(number), content)
        return content


class BlockCache:
    """LRU cache of blocks as files in a folder, shared by processes.

    A block is written to a temporary file and renamed, so readers see complete blocks. If the disk
    is full, blocks are simply not cached.

    Args:
        folder: folder of the files; created if missing.
        limit_bytes: total size of all blocks.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._added = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"cache {printable(folder)} cannot be created: {error.strerror}; set another cache"
            ) from error
        self._trim()

    def has(self, name: str) -> bool:
        """Return True if a block is cached."""
        return (self.folder / name).exists()

    def get(self, name: str, begin: int, end: int) -> bytes | None:
        """Return a range of a block; None if it is not cached completely."""
        # Another process may remove the file at any time; an open descriptor stays readable.
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            content = os.pread(descriptor, end - begin, begin)
            os.utime(descriptor)  # marks it as recently used, for `_trim`
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return content if len(content) == end - begin else None

    def put(self, name: str, content: bytes) -> None:
        """Store a block, and remove the least recently used blocks beyond the limit."""
        # Unique name: other processes and threads may store the same block at the same time.
        temporary = self.folder / f".{name}.{os.getpid()}.{random.getrandbits(32):08x}"
        try:
            temporary.write_bytes(content)
            temporary.replace(self.folder / name)
        except OSError as error:
            logger.debug("block is not cached: %s", error)
            temporary.unlink(missing_ok=True)
            return
        # Per process and approximate: scanning the folder at every block would be slow.
        self._added += len(content)
        if self._added * TRIM_DIVISOR > self.limit_bytes:
            self._trim()

    def _trim(self) -> None:
        """Remove the least recently used blocks until the others fit."""
        self._added = 0
        entries = []
        with os.scandir(self.folder) as files:
            for file in files:
                try:
                    status = file.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process removed it
                    continue
                entries.append((status.st_mtime_ns, status.st_size, file.path))
        # Leave room for the blocks that processes add until the next trim.
        excess = sum(size for _, size, _ in entries) - self.limit_bytes * (1 - 1 / TRIM_DIVISOR)
        # By time of last use, oldest first.
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            Path(path).unlink(missing_ok=True)
            excess -= size


def _cache_folder(folder: str | Path | None) -> Path:
    if folder is not None:
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ms-data" / "blocks"
