"""Lock an output folder that does not exist yet, so that only one process writes it.

The lock is a file next to the folder; it is removed when its holder ends.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from ms_compress.files.durable import atomic_folder
from ms_compress.files.run_folder import locked


@contextmanager
def new_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty temporary folder that is renamed to `folder` if the block succeeds.

    Raises:
        FolderError: another process is writing the folder.
        WriteError: the folder exists and `overwrite` is false, or it cannot be written.
    """
    with (
        output_lock(folder.with_name(f"{folder.name}.partial")),
        atomic_folder(folder, overwrite=overwrite) as partial,
    ):
        yield partial


def output_lock(path: Path) -> AbstractContextManager[None]:
    """Lock `path` against other processes; its parent folder is created if missing.

    Raises:
        FolderError: another process holds the lock.
        WriteError: the parent folder cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    remedy = "choose another output folder"
    return locked(lock, resource=str(path), state="being written", remedy=remedy, keep=False)
