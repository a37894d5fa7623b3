"""Paths that functions take, refused before anything is read or made."""

import os
from pathlib import Path
from typing import Literal

from ms_data.corpus.places import is_remote
from ms_data.errors import OutputError, SettingError
from ms_data.files.untrusted import check_path


def check_paths(
    out: str | Path, *, written: Literal["folder", "file"] | None = "folder", **read: object
) -> None:
    """Check the path of what is made, or the prefix of its files, and the paths that are read.

    Anything but a path passes, and so does an address that fsspec reaches.

    Raises:
        SettingError: no system takes a path to read.
        OutputError: no system takes the path of what is made.
    """
    for name, path in read.items():
        if isinstance(path, str | os.PathLike) and not is_remote(str(path)):
            check_path(name, path, error=SettingError)
    check_path("out", out, error=OutputError, written=written)
