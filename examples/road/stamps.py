"""Whether a stage is done: what it was made from, and what it made, by content.

A stage's identity is a digest of its command lines, its run files and scripts, and what it reads.
Its stamp holds that and a digest of what it made. Where both are as they were, the stage is done.
"""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from stages import Stage

STAMPS = "stages"


class Stamp(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="stage-1"):
    """What is known of a stage that was begun."""

    identity: str
    """Digest of what it is made from."""
    made: str = ""
    """Digest of what it made; empty until it is done."""
    wall_s: float = 0.0
    """Seconds that it took, over all tries."""
    processor_s: float = 0.0
    """Seconds of processor time, of itself and its processes, over all tries."""
    load: float = 0.0
    """Processes that wanted a core at its end, on average over a minute."""

    def __post_init__(self) -> None:
        if not self.identity or not (self.wall_s >= 0 and self.processor_s >= 0):
            raise ValueError("a stamp has an identity, and times are not negative")


State = Literal["done", "begun", "changed", "new"]
"""A stage has nothing to do, can go on, begins anew as its settings changed, or is untouched."""


def digest(paths: Iterable[Path]) -> str:
    """One number of all files at the paths: their places and bytes; a missing path counts too."""
    total = hashlib.blake2b(digest_size=16)
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                with file.open("rb") as opened:
                    content = hashlib.file_digest(opened, "blake2b").hexdigest()
            else:
                content = "folder" if file.is_dir() else "missing"
            total.update(f"{file.relative_to(path)}\0{content}\0".encode())
    return total.hexdigest()


def identity(stage: Stage, folder: Path) -> str:
    """The digest of what a stage is made from; the place of the repository does not count."""
    home = str(Path(__file__).resolve().parents[2])
    lines = "\n".join(stage.lines()).replace(home, "")
    inputs = digest([*stage.settings, *(folder / name for name in stage.reads)])
    return hashlib.blake2b(f"{lines}\n{inputs}".encode(), digest_size=16).hexdigest()


def read_stamp(stage: Stage, folder: Path) -> Stamp | None:
    """The stamp of a stage; None where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(
            (folder / STAMPS / f"{stage.name}.json").read_bytes(), type=Stamp
        )
    except (OSError, msgspec.MsgspecError):
        return None


def write_stamp(stage: Stage, folder: Path, stamp: Stamp) -> None:
    """Write a stamp whole or not at all."""
    path = folder / STAMPS / f"{stage.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    with aside.open("wb") as file:
        file.write(msgspec.json.encode(stamp))
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def made(stage: Stage, folder: Path) -> str:
    """The digest of what a stage made; empty where a part of it is missing."""
    paths = [folder / name for name in stage.makes]
    return digest(paths) if all(path.exists() for path in paths) else ""


def state(stage: Stage, folder: Path) -> State:
    """What is to be done of a stage."""
    stamp = read_stamp(stage, folder)
    if stamp is None:
        return "new"
    if stamp.identity != identity(stage, folder):
        return "changed"
    return "done" if stamp.made and stamp.made == made(stage, folder) else "begun"
