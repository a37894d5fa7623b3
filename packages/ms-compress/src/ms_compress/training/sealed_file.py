"""Files with a digest over every byte, which is checked before the content is used.

The first line is the BLAKE2b hash of everything after it, the second a header of one line of JSON,
and the rest is the payload. Any changed, missing or additional bit is detected.
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
"""Maximum length of a header."""


def write_sealed(path: Path, header: bytes, write: Callable[[BinaryIO], object]) -> None:
    """Write a sealed file, which appears complete or not at all.

    Args:
        path: path of the file; an existing file is replaced.
        header: one line, without a line end.
        write: called with the file to write the payload sequentially.

    Raises:
        ExportError: the file cannot be written.
    """

    def write_all(file: BinaryIO) -> None:
        # A placeholder, as the digest is only known once the payload is written.
        file.write(b"0" * DIGEST_CHARACTERS + b"\n")
        hashing = _Hashing(file)
        hashing.write(header + b"\n")
        write(hashing)  # type: ignore[arg-type]  # only its write method is used
        file.seek(0)
        file.write(hashing.hash.hexdigest().encode())

    replace(path, write_all)


@contextmanager
def opened(path: Path) -> Iterator[tuple[bytes, BinaryIO]]:
    """Open a sealed file after checking its digest; yields the header, and the file at its payload.

    Raises:
        ConfigError: the file is damaged, or cannot be read.
    """
    try:
        file = BufferedReader(open_file(path, error=ConfigError))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    with file:
        digest_line = file.read(DIGEST_CHARACTERS + 1)
        if digest_line != _digest(file) + b"\n":
            raise ConfigError(
                f"{path} is damaged: its contents do not match its digest; remove it to restart"
            )
        # The digest read the whole file; return to the header.
        file.seek(len(digest_line))
        header = file.readline(HEADER_BYTES)
        yield header.removesuffix(b"\n"), file


class _Hashing:
    """A writer that hashes the data it passes on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.blake2b()

    def write(self, content: bytes | bytearray | memoryview) -> int:
        self.hash.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _digest(file: BinaryIO) -> bytes:
    """Return the hex digest of the rest of a file."""
    digest = hashlib.blake2b()
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest().encode()
