"""Checks of the paths that public functions take."""

import os
from pathlib import Path
from typing import Literal

from ms_data.corpus.places import is_remote
from ms_data.errors import OutputError, SettingError
from ms_data.files.untrusted import check_path


def check_paths(
    out: str | Path, *, written: Literal["folder", "file"] | None = "folder", **inputs: object
) -> None:
    """Check an output path (or file prefix) and the input paths before any file is touched.

    Values that are not paths, and URLs for fsspec, are not checked.

    Raises:
        SettingError: an input path is invalid on any operating system.
        OutputError: the output path is invalid on any operating system.
    """
    for name, path in inputs.items():
        if isinstance(path, str | os.PathLike) and not is_remote(str(path)):
            check_path(name, path, error=SettingError)
    check_path("out", out, error=OutputError, written=written)
