"""Recordings as folders: files with their paths on the machine, command outputs, and JSON facts.

    RECORDING/measured.json                      joint measurements of the ranks
    RECORDING/rank-0/machine.json                facts of the process
    RECORDING/rank-0/files/sys/class/net/...     files by path
    RECORDING/rank-0/commands/nvidia-smi -q.txt  outputs by command line

A folder without `rank-0` holds a single rank. Each of the three may be missing, so that a
recording can be gathered by hand.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ms_profile.doctor.recording import Examined, Machine, MachineRecording, Measured
from ms_profile.errors import FormatError, RecordError
from ms_profile.files.untrusted import check_path, read_bytes, read_json
from ms_profile.log.manifest import encode

LIMIT_BYTES = 1 << 20
MAX_FILES = 10_000
"""Maximum number of files per rank."""
MAX_RANKS = 1 << 14
SUFFIX = ".txt"
MACHINE, MEASURED = "machine.json", "measured.json"


def write_recording(folder: Path, examined: Examined) -> None:
    """Write a new folder for `read_recording`, atomically.

    Raises:
        RecordError: the folder exists or cannot be written.
    """
    check_path("the recording", folder, error=FormatError, written="folder")
    if folder.exists():
        raise RecordError(f"{folder} exists; remove it or choose another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
            partial = Path(name) / "recording"
            partial.mkdir()
            _write(partial, examined)
            # Within the same parent folder, so the rename is atomic.
            partial.rename(folder)
    except OSError as error:
        raise RecordError(
            f"{folder} cannot be written: {error.strerror or error}; choose another folder"
        ) from error


def _write(folder: Path, examined: Examined) -> None:
    (folder / MEASURED).write_bytes(encode(examined.measured))
    for recording in examined.ranks:
        rank_folder = folder / f"rank-{recording.machine.rank}"
        rank_folder.mkdir()
        (rank_folder / MACHINE).write_bytes(encode(recording.machine))
        texts = {f"files/{path}": text for path, text in recording.files.items()}
        texts |= {f"commands/{line}{SUFFIX}": text for line, text in recording.commands.items()}
        for path, text in texts.items():
            (rank_folder / path).parent.mkdir(parents=True, exist_ok=True)
            (rank_folder / path).write_text(text)


def read_recording(folder: Path) -> Examined:
    """Read a recording.

    Raises:
        FormatError: the folder does not exist or is not a recording; or a file cannot be read, is
            too large, or is outside the folder.
    """
    check_path("the recording", folder, error=FormatError)
    if not folder.is_dir():
        raise FormatError(f"{folder} is not a folder; use one written by doctor --record")
    rank_folders = _rank_folders(folder)
    if not rank_folders:
        raise FormatError(
            f"{folder} is not a recording: it has no rank-0, {MACHINE}, files or commands; use a"
            " folder written by doctor --record"
        )
    ranks = tuple(_rank(folder, number, path) for number, path in rank_folders.items())
    path = folder / MEASURED
    measured = Measured()
    if path.exists():
        _check_inside(folder, path)
        measured = read_json(path, Measured, error=FormatError)
    _check_ranks(path, measured, len(ranks))
    return Examined(ranks=ranks, measured=measured)


def _rank_folders(folder: Path) -> dict[int, Path]:
    """Folder of each rank, by number."""
    rank_folders = {}
    for path in folder.glob("rank-*"):
        number = path.name.removeprefix("rank-")
        if number.isdecimal() and len(number) < 8 and path.is_dir():
            rank_folders[int(number)] = path
    if len(rank_folders) > MAX_RANKS:
        raise FormatError(
            f"{folder} has {len(rank_folders)} ranks; at most {MAX_RANKS} are supported"
        )
    if sorted(rank_folders) != list(range(len(rank_folders))):
        raise FormatError(
            f"{folder} lacks ranks: it has {_short(sorted(rank_folders))}; add the missing ones"
        )
    is_single = any((folder / name).exists() for name in (MACHINE, "files", "commands"))
    return dict(sorted(rank_folders.items())) or ({0: folder} if is_single else {})


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _rank(top: Path, number: int, rank_folder: Path) -> MachineRecording:
    machine = Machine()
    if (rank_folder / MACHINE).exists():
        _check_inside(top, rank_folder / MACHINE)
        machine = read_json(rank_folder / MACHINE, Machine, error=FormatError)
    machine = msgspec.structs.replace(machine, rank=number)
    outputs = dict(_texts(top, rank_folder / "commands"))
    return MachineRecording(
        machine=machine,
        files=dict(_texts(top, rank_folder / "files")),
        commands={line.removesuffix(SUFFIX): text for line, text in outputs.items()},
    )


def _texts(top: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Read every file below a folder, by relative path."""
    count = 0
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path, count = Path(parent, name), count + 1
            if count > MAX_FILES:
                raise FormatError(f"{folder} has more than {MAX_FILES} files; remove some")
            _check_inside(top, path)
            content = read_bytes(path, error=FormatError, limit_bytes=LIMIT_BYTES)
            yield str(path.relative_to(folder)), content.decode(errors="replace")


def _check_inside(top: Path, path: Path) -> None:
    try:
        inside = path.resolve().is_relative_to(top.resolve())
    except (OSError, RuntimeError):  # circular links
        inside = False
    if not inside:
        raise FormatError(f"{path} links out of the recording; replace the link with a copy")


def _check_ranks(path: Path, measured: Measured, count: int) -> None:
    mentioned = [clock.rank for clock in measured.clocks] + [
        folder.rank for folder in measured.folders
    ]
    mentioned += [rank for pair in measured.pairs for rank in (pair.first, pair.second)]
    invalid = next((rank for rank in mentioned if not 0 <= rank < count), None)
    if invalid is not None:
        raise FormatError(
            f"{path} has measurements of rank {invalid} but there are {count} ranks; add its"
            " recording"
        )
