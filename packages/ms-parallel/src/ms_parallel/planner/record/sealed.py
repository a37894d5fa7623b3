"""Files of one value with its digest, so that a damaged one is known."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import write_file, writing
from ms_parallel.files.untrusted import decode_json, read_bytes

LIMIT_BYTES = 1 << 24
T = TypeVar("T")


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="seal.v1"):
    digest: str
    """Digest of the value's bytes."""
    value: msgspec.Raw


def write_sealed(path: Path, value: Any) -> None:
    """Write a file that `read_sealed` reads, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    content = msgspec.json.encode(value)
    sealed = _Sealed(digest=_digest(content), value=msgspec.Raw(content))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.encode(sealed))


def read_sealed(path: Path, kind: type[T], *, what: str) -> T | None:
    """Read the value of a sealed file; None if there is no file.

    Args:
        path: the file.
        kind: of the value.
        what: it is, for messages.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    if not os.path.lexists(path):
        return None
    where = f"{path}: not {what}"
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    sealed = decode_json(content, _Sealed, where=where, error=ConfigError)
    if _digest(bytes(sealed.value)) != sealed.digest:
        raise ConfigError(f"{where}: its digest is another")
    return decode_json(bytes(sealed.value), kind, where=where, error=ConfigError)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
