"""One pass over a corpus as an array of jobs, each of which answers every n-th batch.

A job reads the whole corpus, works on its own batches, and keeps their answers in a file of
`OUT.shards`. Merging is the same pass again that looks the answers up instead of working, so that
the bytes are those of one machine. An answer is found by a checksum of what was asked: were the
corpus or a setting another, there would be none.
"""

import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import TypeVar

import xxhash
from attrs import frozen

from ms_data.errors import OutputError, SettingError, printable
from ms_data.files.durable import publish, sync_folder, write_all, writing
from ms_data.files.work_folder import refuse_inside

T = TypeVar("T")

_MAGIC = b"MSDPART1"
_KEY_BYTES, _NUMBER_BYTES = 16, 8
_HEAD_BYTES = _KEY_BYTES + 2 * _NUMBER_BYTES
_WRITTEN = re.compile(r"(\d+|merge)/(\d+)")


def key_of(request: bytes) -> bytes:
    """Compute the key that an answer is found by: xxh3-128 of what was asked."""
    return xxhash.xxh3_128_digest(request)


@frozen
class ArrayShard:
    """What one job of an array does."""

    folder: Path
    """Where all jobs keep their answers."""
    number: int
    """From 1; 0 merges the answers of all."""
    count: int

    @classmethod
    def parse(
        cls, text: str | None, out: str | Path, corpus: str | Path | Sequence[str | Path]
    ) -> "ArrayShard | None":
        """Read `3/16`, the third job of sixteen, or `merge/16`, the one that follows them.

        Raises:
            SettingError: it is neither.
            OutputError: the folder of the answers would lie in the corpus.
        """
        if text is None:
            return None
        found = _WRITTEN.fullmatch(text)
        number, count = (int(found[1].replace("merge", "0")), int(found[2])) if found else (0, 0)
        if not found or not 0 <= number <= count or not count or found[1] == "0":
            raise SettingError(
                f"shard is {printable(text)!r}; give 3/16 for the third job of 16, the first of "
                "which is 1/16, and merge/16 when all are done"
            )
        place = Path(os.path.realpath(out))
        folder = place.with_name(f"{place.name}.shards")
        for one in [corpus] if isinstance(corpus, str | Path) else corpus:
            refuse_inside(folder, one)
        return cls(folder, number, count)

    def path(self, number: int | None = None) -> Path:
        """Return the file of a job's answers; None: of this one's."""
        return self.folder / f"{self.number if number is None else number}-of-{self.count}.answers"

    def remove(self) -> None:
        """Remove the answers of all jobs, once they are merged."""
        for number in range(1, self.count + 1):
            self.path(number).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()

    def remove_partial(self) -> None:
        """Remove what this job wrote and did not finish."""
        self._aside.unlink(missing_ok=True)

    @property
    def _aside(self) -> Path:
        return self.folder / f"{self.path().name}.partial"

    @contextmanager
    def writing(self, identity: bytes) -> Iterator["AnswerWriter"]:
        """Write the file of this job's answers, or continue one that was interrupted.

        Args:
            identity: all that decides the answers apart from what is asked, as `key_of` gives it.

        Raises:
            OutputError: another process writes it, or it cannot be written.
        """
        aside = self._aside
        with writing(aside):
            self.folder.mkdir(parents=True, exist_ok=True)
            # Never through a link that somebody put under the predictable name, nor into a pipe.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with open(os.open(aside, flags, 0o666), "r+b", buffering=0) as file:
                _lock(file, aside)
                yield AnswerWriter(self, file, identity)
                os.fsync(file.fileno())
                publish(aside, self.path())
            sync_folder(self.folder)


def merged(shard: ArrayShard | None, summary: T) -> T:
    """Remove the answers that were merged, if any were, and return the summary.

    A merge that finds OUT finished does so too, as one that was killed may have left answers.
    """
    if shard is not None and not shard.number:
        shard.remove()
    return summary


class AnswerWriter:
    """Appends answers to the file of one job.

    Args:
        shard: the job.
        file: locked; what it holds already is kept as far as it is whole and of this identity.
        identity: see `ArrayShard.writing`.
    """

    def __init__(self, shard: ArrayShard, file: FileIO, identity: bytes) -> None:
        self._shard, self._file = shard, file
        self._known = {key for key, _, _ in _read(file, identity)}
        size = file.tell() if self._known else 0
        file.seek(size)
        file.truncate(size)
        if not size:
            write_all(file, _MAGIC + identity)

    def wants(self, index: int, key: bytes) -> bool:
        """Return whether a batch is this job's to answer, and is not answered yet."""
        return index % self._shard.count == self._shard.number - 1 and key not in self._known

    def add(self, key: bytes, answer: bytes) -> None:
        """Write an answer."""
        numbers = (len(answer), xxhash.xxh3_64_intdigest(answer))
        head = key + b"".join(one.to_bytes(_NUMBER_BYTES, "little") for one in numbers)
        write_all(self._file, head + answer)
        self._known.add(key)


class Answers:
    """The answers of all jobs.

    Raises:
        OutputError: a job is not done, or was given other settings, or its file is damaged.
    """

    def __init__(self, shard: ArrayShard, identity: bytes) -> None:
        self._places: dict[bytes, tuple[Path, int, int]] = {}
        self._folder = shard.folder
        for number in range(1, shard.count + 1):
            path = shard.path(number)
            if not path.is_file():
                raise OutputError(
                    f"{printable(path)} is not there; run the same with --shard "
                    f"{number}/{shard.count} first"
                )
            for key, begin, size in answers_in(path, identity):
                self._places[key] = (path, begin, size)

    def find(self, key: bytes) -> bytes:
        """Return the answer to the request of this key.

        Raises:
            OutputError: no job has answered it.
        """
        place = self._places.get(key)
        if place is None:
            raise OutputError(
                f"{printable(self._folder)} lacks the answer to a part of the corpus, which may "
                "have changed since; remove that folder and run all shards again"
            )
        path, begin, size = place
        with path.open("rb") as file:
            file.seek(begin)
            return file.read(size)


def answers_in(path: Path, identity: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the key of each answer in a finished file, and where it begins and how long it is.

    Raises:
        OutputError: it was made with other settings, or is damaged.
    """
    with path.open("rb", buffering=0) as file:
        if file.read(len(_MAGIC) + _KEY_BYTES) != _MAGIC + identity:
            raise OutputError(
                f"{printable(path)} was made with other settings, or is damaged; give those it "
                "had, or remove it and run its shard again"
            )
        yield from _read(file, identity)
        if file.tell() != path.stat().st_size:
            raise OutputError(f"{printable(path)}: damaged; remove it and run its shard again")


def _read(file: FileIO, identity: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Read whole answers and leave the file behind the last of them."""
    file.seek(0)
    end = file.tell()
    if file.read(len(_MAGIC) + _KEY_BYTES) == _MAGIC + identity:
        end = file.tell()
        largest = os.fstat(file.fileno()).st_size
        while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
            size, checksum = (
                int.from_bytes(head[at : at + _NUMBER_BYTES], "little")
                for at in (_KEY_BYTES, _KEY_BYTES + _NUMBER_BYTES)
            )
            begin = end + _HEAD_BYTES
            if begin + size > largest:
                break
            content = file.read(size)
            if len(content) < size or xxhash.xxh3_64_intdigest(content) != checksum:
                break
            end = begin + size
            yield head[:_KEY_BYTES], begin, size
    file.seek(end)


def _lock(file: FileIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another process is writing {path}; wait for it") from None
