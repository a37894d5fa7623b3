"""The readers: a module each, which names its `Reader` as `READER`."""

from importlib import import_module
from pkgutil import iter_modules

from ms_data.corpus.reader import Reader

__all__ = ["READERS", "reader_of"]

READERS: dict[str, Reader] = {
    module.name: import_module(f"{__name__}.{module.name}").READER
    for module in iter_modules(__path__)
}
"""Every module of this folder, by name."""


def reader_of(name: str, head: bytes) -> Reader | None:
    """Find the reader that claims a file by its unpacked name and first bytes, if one does."""
    return next((one for one in READERS.values() if one.claims(name, head)), None)
