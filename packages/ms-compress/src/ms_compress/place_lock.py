"""One writer at a time of a folder that is not there yet.

The lock is a file beside, which goes with its holder: the folder is all that shall be left.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ms_compress.files.durable import whole_folder
from ms_compress.files.run_folder import locked


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give an empty folder that takes the name `folder` when all went well, as its one writer.

    Raises:
        FolderError: another process is writing it.
        WriteError: it is there already and `overwrite` is not given, or it cannot be written.
    """
    with (
        alone(folder.with_name(f"{folder.name}.partial")),
        whole_folder(folder, overwrite=overwrite) as aside,
    ):
        yield aside


def alone(path: Path) -> AbstractContextManager[None]:
    """Keep other processes that would do the same from `path`, whose folder is made if missing.

    Raises:
        FolderError: another process holds it.
        WriteError: the place cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    remedy = "choose another place"
    return locked(lock, what=str(path), state="being written", remedy=remedy, stays=False)
