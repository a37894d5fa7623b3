"""The checkpoints of one run: which are complete, which may be deleted, what a crash left."""

import os
import re
import shutil
from pathlib import Path

from ms_parallel.checkpoint.manifest import MANIFEST
from ms_parallel.files.durable import publish, write_file, writing

STEP = re.compile(r"step-([0-9]{8,15})")
DAMAGED = re.compile(r"step-[0-9]{8,15}\.damaged-[0-9]+")
LAST = "last"
"""Holds the last step whose checkpoint was completed, so that a loss of all is seen."""
LEFTOVER = re.compile(r"step-[0-9]{8,15}\.(partial|removed)")


def step_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def all_steps(root: Path) -> list[int]:
    """Steps of everything that has a checkpoint's name, damaged or not, ascending."""
    found = [STEP.fullmatch(name) for name in _names(root)]
    return sorted(int(match[1]) for match in found if match)


def complete_steps(root: Path) -> list[int]:
    """Steps of the checkpoints that have a manifest, ascending."""
    return [step for step in all_steps(root) if (step_folder(root, step) / MANIFEST).is_file()]


def was_begun(root: Path) -> bool:
    """Return whether a checkpoint was ever completed here, whatever has become of it."""
    return any(
        name == LAST or STEP.fullmatch(name) or DAMAGED.fullmatch(name) for name in _names(root)
    )


def note_last(root: Path, step: int) -> None:
    """Keep in mind that the checkpoint of `step` was completed."""
    write_file(root / LAST, b"%d\n" % step)


def _names(root: Path) -> list[str]:
    return os.listdir(root) if root.is_dir() else []


def keep_last(root: Path, count: int) -> None:
    """Delete all but the last `count` complete checkpoints.

    Each is renamed first, so that a crash leaves no half of one that looks complete.
    """
    for step in complete_steps(root)[:-count]:
        folder = step_folder(root, step)
        doomed = folder.with_name(folder.name + ".removed")
        with writing(folder):
            publish(folder, doomed)
            shutil.rmtree(doomed)


def set_aside(root: Path, step: int) -> Path:
    """Rename a damaged checkpoint so that it is neither used nor lost; return its new place."""
    folder = step_folder(root, step)
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    with writing(folder):
        publish(folder, aside)
    return aside


def sweep(root: Path) -> None:
    """Remove what a crash during a save or a deletion has left."""
    if root.is_dir():
        for path in root.iterdir():
            if LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
