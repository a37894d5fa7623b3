"""Files whose every byte is covered by a digest, which is checked before any of it is used.

The first line is the BLAKE2b of all that follows; the second a header, one line of JSON; the rest
is the payload. Whatever bit is changed, cut off or added, the file is known to be damaged.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from ms_compress.errors import ConfigError
from ms_compress.files.durable import replace
from ms_compress.files.untrusted import open_file

DIGEST_CHARACTERS = 128
CHUNK_BYTES = 2**20
HEADER_BYTES = 2**26
"""What a header is never longer than."""


def write_sealed(path: Path, header: bytes, write: Callable[[BinaryIO], object]) -> None:
    """Let `write` write the payload of a sealed file, which appears whole or not at all.

    Args:
        path: of the file; what is there is replaced.
        header: one line, without its end.
        write: is given the file, and writes without going back.

    Raises:
        ExportError: the disk refuses.
    """

    def write_all(file: BinaryIO) -> None:
        file.write(b"0" * DIGEST_CHARACTERS + b"\n")
        hashing = _Hashing(file)
        hashing.write(header + b"\n")
        write(hashing)  # type: ignore[arg-type]  # it only writes
        file.seek(0)
        file.write(hashing.hash.hexdigest().encode())

    replace(path, write_all)


@contextmanager
def opened(path: Path) -> Iterator[tuple[bytes, BinaryIO]]:
    """Open a sealed file whose digest is right; return its header, and the file at its payload.

    Raises:
        ConfigError: it is damaged, or cannot be read.
    """
    try:
        file = BufferedReader(open_file(path, error=ConfigError))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    with file:
        said = file.read(DIGEST_CHARACTERS + 1)
        if said != _digest(file) + b"\n":
            raise ConfigError(
                f"{path} is damaged: its bytes are not those that were written; remove it to begin"
                " anew"
            )
        file.seek(len(said))
        header = file.readline(HEADER_BYTES)
        yield header.removesuffix(b"\n"), file


class _Hashing:
    """A writer that hashes what it passes on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.blake2b()

    def write(self, content: bytes | bytearray | memoryview) -> int:
        self.hash.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _digest(file: BinaryIO) -> bytes:
    """Return the digest of the rest of a file, in hexadecimal."""
    whole = hashlib.blake2b()
    while chunk := file.read(CHUNK_BYTES):
        whole.update(chunk)
    return whole.hexdigest().encode()
