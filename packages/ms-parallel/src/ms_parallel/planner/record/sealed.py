"""Files of one value with a checksum, so that damage is detected."""

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
    """Checksum of the value's bytes."""
    value: msgspec.Raw


def write_sealed(path: Path, value: Any) -> None:
    """Write a file for `read_sealed`, atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    content = msgspec.json.encode(value)
    sealed = _Sealed(digest=_digest(content), value=msgspec.Raw(content))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, msgspec.json.encode(sealed))


def read_sealed(path: Path, value_type: type[T], *, label: str) -> T | None:
    """Read the value of a sealed file; None without a file.

    Args:
        path: path of the file.
        value_type: type of the value.
        label: noun phrase for the file's content in messages, such as "a plan".

    Raises:
        ConfigError: the file cannot be read or is damaged.
    """
    if not os.path.lexists(path):
        return None
    context = f"{path}: not {label}"
    content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
    sealed = decode_json(content, _Sealed, where=context, error=ConfigError)
    # Compare the raw bytes: encoding the value again might give others.
    if _digest(bytes(sealed.value)) != sealed.digest:
        raise ConfigError(f"{context}: its checksum does not match")
    return decode_json(bytes(sealed.value), value_type, where=context, error=ConfigError)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
