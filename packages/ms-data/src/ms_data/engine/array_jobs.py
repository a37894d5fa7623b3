"""Splits a run over an array of n jobs; each one processes every n-th batch.

A job reads the entire corpus, processes its batches, and stores the results in a file of
`OUT.shards`. Merging repeats the run but looks up the results instead of computing them, so the
output is identical to that of a single machine. Results are keyed by a checksum of the request, so
results of another corpus or other settings are never used.
"""

import fcntl
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import xxhash
from attrs import frozen

from ms_data.arguments import check_type
from ms_data.errors import OutputError, SettingError, printable
from ms_data.files.durable import publish, sync_folder, write_all, writing
from ms_data.files.work_folder import check_outside_corpus

_MAGIC = b"MSDPART1"
_KEY_BYTES = 16
_HEADER = struct.Struct("<16sQQ")
"""Key, size and xxh3-64 of a result, which follows."""
_PATTERN = re.compile(r"(\d+|merge)/(\d+)")


def request_key(request: bytes) -> bytes:
    """Return the key of a result: the xxh3-128 of the request."""
    return xxhash.xxh3_128_digest(request)


@frozen
class ArrayShard:
    """One job of an array."""

    folder: Path
    """Folder of the results of all jobs."""
    number: int
    """Number from 1; 0 merges the results of all jobs."""
    count: int

    @classmethod
    def parse(
        cls, text: str, out: str | Path, corpus: str | Path | Sequence[str | Path]
    ) -> "ArrayShard":
        """Parse `3/16`, the third of 16 jobs, or `merge/16`, the final merge.

        Raises:
            SettingError: the text has another format.
            OutputError: the result folder would be inside the corpus.
        """
        check_type("shard", text, str, "a text such as 3/16", error=SettingError)
        match = _PATTERN.fullmatch(text)
        number, count = (int(match[1].replace("merge", "0")), int(match[2])) if match else (0, 0)
        if not match or not 0 <= number <= count or not count or match[1] == "0":
            raise SettingError(
                f"shard must be I/N, from 1/N to N/N, or merge/N, got {printable(text)!r}; use "
                "3/16 for the third of 16 jobs, and merge/16 when all are done"
            )
        out_path = Path(os.path.realpath(out))
        folder = out_path.with_name(f"{out_path.name}.shards")
        for source in [corpus] if isinstance(corpus, str | Path) else corpus:
            check_outside_corpus(folder, source)
        return cls(folder, number, count)

    def path(self, number: int | None = None) -> Path:
        """Return the result file of a job; None: of this job."""
        return self.folder / f"{self.number if number is None else number}-of-{self.count}.answers"

    @property
    def merges(self) -> bool:
        """Whether this job merges the results of all others."""
        return not self.number

    def remove_merged(self) -> None:
        """Remove the result files of all jobs if this job has merged them.

        A repeated merge also removes them, as an earlier one may have been killed before that.
        """
        if not self.merges:
            return
        for number in range(1, self.count + 1):
            self.path(number).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def remove_partial(self) -> None:
        """Remove this job's unfinished result file."""
        self._partial.unlink(missing_ok=True)

    @property
    def _partial(self) -> Path:
        return self.folder / f"{self.path().name}.partial"

    @contextmanager
    def writing(self, settings_key: bytes) -> Iterator["ResultWriter"]:
        """Write this job's result file, or continue an interrupted one.

        Args:
            settings_key: key of everything besides the request that affects results.

        Raises:
            OutputError: another process writes the file, or it cannot be written.
        """
        partial = self._partial
        with writing(partial):
            self.folder.mkdir(parents=True, exist_ok=True)
            # The name is predictable, so never follow a link or write into a pipe of that name.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(partial, flags, 0o666), "r+b", buffering=0) as file:
                _lock(file, partial)
                yield ResultWriter(self, file, settings_key)
                os.fsync(file.fileno())
                publish(partial, self.path())  # the final name means that all results are there
            sync_folder(self.folder)


class ResultWriter:
    """Appends results to the file of one job.

    Args:
        shard: the job.
        file: locked result file; valid results of these settings are kept.
        settings_key: see `ArrayShard.writing`.
    """

    def __init__(self, shard: ArrayShard, file: FileIO, settings_key: bytes) -> None:
        self._shard, self._file = shard, file
        # Reading stops after the last valid result; a torn one after it is cut off below.
        self._stored_keys = {key for key, _, _ in _read_valid(file, settings_key)}
        size = file.tell() if self._stored_keys else 0
        file.seek(size)
        file.truncate(size)
        if not size:
            write_all(file, _MAGIC + settings_key)

    def should_run(self, index: int, key: bytes) -> bool:
        """Return whether a batch belongs to this job and has no result yet."""
        # Batches are dealt out in turn, so every job gets a similar amount of text.
        return index % self._shard.count == self._shard.number - 1 and key not in self._stored_keys

    def add(self, key: bytes, result: bytes) -> None:
        """Write a result."""
        header = _HEADER.pack(key, len(result), xxhash.xxh3_64_intdigest(result))
        write_all(self._file, header + result)
        self._stored_keys.add(key)


class StoredResults:
    """The results of all jobs.

    Raises:
        OutputError: a job is not done, had other settings, or its file is damaged.
    """

    def __init__(self, shard: ArrayShard, settings_key: bytes) -> None:
        self._entries: dict[bytes, tuple[Path, int, int]] = {}
        self._folder = shard.folder
        for number in range(1, shard.count + 1):
            path = shard.path(number)
            if not path.is_file():
                raise OutputError(
                    f"{printable(path)} is missing; run the command with --shard "
                    f"{number}/{shard.count} first"
                )
            for key, offset, content in read_results(path, settings_key):
                self._entries[key] = (path, offset, len(content))

    def find(self, key: bytes) -> bytes:
        """Return the result of a request.

        Raises:
            OutputError: no job has processed the request.
        """
        entry = self._entries.get(key)
        if entry is None:
            raise OutputError(
                f"{printable(self._folder)} lacks the result of a part of the corpus, which may "
                "have changed since; remove that folder and run all shards again"
            )
        path, offset, size = entry
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def read_results(path: Path, settings_key: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield key, offset and content of every result in a finished file.

    Raises:
        OutputError: the file was written with other settings, or is damaged.
    """
    with path.open("rb", buffering=0) as file:
        if file.read(len(_MAGIC) + _KEY_BYTES) != _MAGIC + settings_key:
            raise OutputError(
                f"{printable(path)} was written with other settings, or is damaged; use the same "
                "settings, or remove it and run its shard again"
            )
        yield from _read_valid(file, settings_key)
        # Only an unfinished file may end with a torn result.
        if file.tell() != path.stat().st_size:
            raise OutputError(f"{printable(path)}: damaged; remove it and run its shard again")


def _read_valid(file: FileIO, settings_key: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield the valid results, and leave the file position after the last one."""
    file.seek(0)
    end = file.tell()
    if file.read(len(_MAGIC) + _KEY_BYTES) == _MAGIC + settings_key:
        end = file.tell()
        largest = os.fstat(file.fileno()).st_size
        while len(header := file.read(_HEADER.size)) == _HEADER.size:
            key, size, checksum = _HEADER.unpack(header)
            begin = end + _HEADER.size
            # A killed job may leave a truncated or damaged last result; stop before it.
            if begin + size > largest:
                break
            content = file.read(size)
            if len(content) < size or xxhash.xxh3_64_intdigest(content) != checksum:
                break
            end = begin + size
            yield key, begin, content
    file.seek(end)


def _lock(file: FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another process is writing {path}; wait for it") from None
