"""Readers of file formats; every module defines its `Reader` as `READER`."""

from importlib import import_module
from pkgutil import iter_modules

from ms_data.corpus.reader import Reader

__all__ = ["READERS", "reader_of"]

READERS: dict[str, Reader] = {
    module.name: import_module(f"{__name__}.{module.name}").READER
    for module in iter_modules(__path__)
}
"""Readers by module name."""


def reader_of(name: str, head: bytes) -> Reader | None:
    """Return the reader that claims a file by its uncompressed name and first bytes, or None."""
    return next((reader for reader in READERS.values() if reader.claims(name, head)), None)
