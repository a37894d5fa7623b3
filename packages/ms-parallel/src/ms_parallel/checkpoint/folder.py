"""The checkpoints of one run: which are complete, which may go, what a crash has left."""

import re
import shutil
from pathlib import Path

from ms_parallel.checkpoint.manifest import MANIFEST
from ms_parallel.durable import publish, writing

__all__ = ["complete_steps", "keep_last", "set_aside", "step_folder", "sweep"]

STEP = re.compile(r"step-([0-9]{8,15})")
LEFTOVER = re.compile(r"step-[0-9]{8,15}\.(partial|removed)")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return root / f"step-{step:08d}"


def complete_steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints, ascending."""
    if not root.is_dir():
        return []
    found = [STEP.fullmatch(path.name) for path in root.iterdir() if (path / MANIFEST).is_file()]
    return sorted(int(match[1]) for match in found if match)


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
