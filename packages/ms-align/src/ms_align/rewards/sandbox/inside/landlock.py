"""Landlock (Linux 5.13): restricts file access to reading below a few paths."""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from .kernel import MissingError, call, libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION, _PATH_BENEATH = 1, 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
"""All file access rights by the Landlock version that introduced them."""
_NETWORK_RIGHTS, _SCOPES = 0b11, 0b11
"""Bind and connect (from version 4); abstract Unix sockets and signals (from version 6)."""


def restrict(readable: Iterable[str]) -> None:
    """Restrict this process and its descendants to reading files below `readable`.

    From version 4 TCP is blocked as well; from version 6, signals to processes outside.

    Raises:
        MissingError: the kernel has no Landlock.
    """
    system = libc().syscall
    version = call("Landlock", system, _CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    # All rights that this version can restrict.
    rights = _FILE_RIGHTS[max(introduced for introduced in _FILE_RIGHTS if introduced <= version)]
    fields = [rights, _NETWORK_RIGHTS if version >= 4 else None, _SCOPES if version >= 6 else None]
    attributes = struct.pack(
        "Q" * sum(field is not None for field in fields), *filter(None, fields)
    )
    size = ctypes.c_size_t(len(attributes))
    ruleset = call("Landlock", system, _CREATE_RULESET, attributes, size, 0)
    try:
        for path in readable:
            _allow_reading(ruleset, path)
        call("Landlock", system, _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, path: str) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise MissingError(f"the interpreter's files at {path}") from error
    try:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        rule = struct.pack("=Qi", _READ_FILE | (_READ_FOLDER if folder else 0), descriptor)
        call("Landlock", libc().syscall, _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)
