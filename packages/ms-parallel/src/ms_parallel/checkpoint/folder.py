"""Folder of a run's checkpoints: complete, damaged and unfinished ones."""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from ms_parallel.arguments import check_integer
from ms_parallel.checkpoint.manifest import MANIFEST
from ms_parallel.errors import CheckpointError
from ms_parallel.files.durable import publish, write_file, writing
from ms_parallel.files.untrusted import check_path

STEP = re.compile(r"step-([0-9]{8,15})")
DAMAGED = re.compile(r"step-[0-9]{8,15}\.damaged-[0-9]+")
LAST = "last"
"""File with the last completed step; shows that there were checkpoints if all are lost."""
LEFTOVER = re.compile(r"step-[0-9]{8,15}\.(partial|removed)")


def _folder(root: str | Path) -> Path:
    check_path("root", root, error=CheckpointError)
    return Path(root)


def step_folder(root: str | Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    check_integer("step", step, minimum=0, error=CheckpointError)
    return _folder(root) / f"step-{step:08d}"


def all_steps(root: str | Path) -> list[int]:
    """List the steps of all checkpoint folders, complete or not, in ascending order."""
    matches = [STEP.fullmatch(name) for name in _names(root)]
    return sorted(int(match[1]) for match in matches if match)


def complete_steps(root: str | Path) -> list[int]:
    """List the steps of the checkpoints that have a manifest, in ascending order."""
    return [step for step in all_steps(root) if (step_folder(root, step) / MANIFEST).is_file()]


def was_begun(root: str | Path) -> bool:
    """Return whether a checkpoint was ever completed here, even if it is damaged or lost now."""
    return any(
        name == LAST or STEP.fullmatch(name) or DAMAGED.fullmatch(name) for name in _names(root)
    )


def note_last(root: str | Path, step: int) -> None:
    """Record that the checkpoint of `step` was completed."""
    check_integer("step", step, minimum=0, error=CheckpointError)
    write_file(_folder(root) / LAST, b"%d\n" % step)


def _names(root: str | Path) -> list[str]:
    folder = _folder(root)
    return os.listdir(folder) if folder.is_dir() else []


def keep_last(root: str | Path, count: int, *, pinned: Collection[Path] = ()) -> None:
    """Delete all but the last `count` complete checkpoints and the `pinned` folders.

    Each is renamed before it is deleted, so that a crash leaves no partial checkpoint that looks
    complete.

    Raises:
        CheckpointError: `count` is below 1.
    """
    check_integer("count", count, minimum=1, error=CheckpointError)
    for step in complete_steps(root)[:-count]:
        folder = step_folder(root, step)
        if folder in pinned:
            continue
        removed = folder.with_name(folder.name + ".removed")
        with writing(folder):
            # Atomic: from here on it is no longer counted as a checkpoint.
            publish(folder, removed)
            shutil.rmtree(removed)


def set_aside(root: str | Path, step: int) -> Path:
    """Rename a damaged checkpoint so that it is kept but never loaded; return its new path."""
    folder = step_folder(root, step)
    number = 1
    while (renamed := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    with writing(folder):
        publish(folder, renamed)
    return renamed


def sweep(root: str | Path) -> None:
    """Remove leftovers of interrupted saves and deletions."""
    folder = _folder(root)
    if folder.is_dir():
        for path in folder.iterdir():
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
