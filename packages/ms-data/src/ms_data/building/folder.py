"""Guards the folder in which a build works, beside the one asked for."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ms_data.building.journal import JOURNAL
from ms_data.errors import OutputError
from ms_data.files.durable import writing

_OURS = re.compile(
    r"(shard-\d{5,}\.msd|index\.json|build\.json|tokenizer\.json|tokenizer_config\.json|"
    r"chat_template\.jinja|journal\.msgpack)(\.partial)?"
)
"""All that a build writes."""


def free_place(out: str | Path) -> Path:
    """Resolves the path of a folder that must not exist yet, or be empty.

    Raises:
        OutputError: something stands there, or no folder can be renamed to it.
    """
    folder = Path(os.path.realpath(out))
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputError(f"{out} is not empty; choose another folder, or remove it")
    if folder.is_mount():
        raise OutputError(f"{out} is a mount point; choose a folder inside it")
    return folder


def refuse_inside(folder: Path, corpus: str | Path) -> None:
    """Refuses a folder in which a later build would read what this one writes.

    Raises:
        OutputError: the folder lies in the corpus, and is not hidden.
    """
    place = Path(os.path.realpath(corpus))
    if not place.is_dir() or not folder.is_relative_to(place):
        return
    if not any(part.startswith(".") for part in folder.relative_to(place).parts):
        raise OutputError(
            f"{folder} lies in the corpus {corpus}, which the next build would read it with; "
            "choose a folder outside"
        )


@contextmanager
def build_folder(aside: Path) -> Iterator[None]:
    """Holds the folder to build in, for this process alone; removes it if it is of no further use.

    Raises:
        OutputError: another process holds it, it holds files of something else, or it cannot be
            written.
    """
    with writing(aside):
        aside.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, aside)
        _refuse_foreign(aside)
        try:
            with writing(aside):
                yield
        except BaseException as error:
            if (aside / JOURNAL).exists():
                error.add_note(f"what is done is kept in {aside}: the same command goes on there")
            else:
                shutil.rmtree(aside, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _lock(descriptor: int, aside: Path) -> None:
    """Takes the folder for this process, if it still stands under its name."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(descriptor), aside.stat())
    except (BlockingIOError, FileNotFoundError):
        same = False
    if not same:
        raise OutputError(
            f"another build is writing {aside}; wait for it, or choose another folder"
        )


def _refuse_foreign(aside: Path) -> None:
    """Refuses a folder with files that no build wrote, which must not be removed."""
    foreign = sorted(path.name for path in aside.iterdir() if not _OURS.fullmatch(path.name))
    if foreign:
        raise OutputError(
            f"{aside} holds {foreign[0]}, which no build wrote; move that folder away, or choose "
            "another place"
        )
