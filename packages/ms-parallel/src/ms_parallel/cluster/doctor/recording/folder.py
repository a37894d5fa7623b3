"""Recordings as folders: files as they lie on the machine, outputs of commands, facts as JSON.

    RECORDING/measured.json                      what the ranks measured together
    RECORDING/rank-0/machine.json                facts of the process
    RECORDING/rank-0/files/sys/class/net/...     files by their paths
    RECORDING/rank-0/commands/nvidia-smi -q.txt  outputs by their command lines

A folder without `rank-0` is one rank's own, and each of the three may be absent, so that one can be
gathered by hand.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ms_parallel.cluster.doctor.recording.recording import (
    Examined,
    Machine,
    Measured,
    Recording,
)
from ms_parallel.errors import ConfigError
from ms_parallel.files.durable import whole_folder, writing
from ms_parallel.files.untrusted import check_path, read_bytes, read_json

LIMIT_BYTES = 1 << 20
MOST_FILES = 10_000
"""Most files that one rank records."""
MOST_RANKS = 1 << 14
SUFFIX = ".txt"
MACHINE, MEASURED = "machine.json", "measured.json"


def write_recording(folder: Path, examined: Examined) -> None:
    """Write a new folder that `read_recording` reads, whole or not at all.

    Raises:
        WriteError: there is something already, or it cannot be written.
    """
    check_path("the recording", folder, error=ConfigError, written="folder")
    with whole_folder(folder) as aside, writing(folder):
        (aside / MEASURED).write_bytes(_json(examined.measured))
        for one in examined.ranks:
            place = aside / f"rank-{one.machine.rank}"
            place.mkdir()
            (place / MACHINE).write_bytes(_json(one.machine))
            texts = {f"files/{path}": text for path, text in one.files.items()}
            texts |= {f"commands/{line}{SUFFIX}": text for line, text in one.commands.items()}
            for path, text in texts.items():
                (place / path).parent.mkdir(parents=True, exist_ok=True)
                (place / path).write_text(text)


def read_recording(folder: Path) -> Examined:
    """Read a recording.

    Raises:
        ConfigError: the folder is not there, holds no recording, or a file of it cannot be read,
            is too large, or lies elsewhere.
    """
    check_path("the recording", folder, error=ConfigError)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give one that doctor --record has written")
    places = _ranks(folder)
    if not places:
        raise ConfigError(
            f"{folder} holds no recording: there is no rank-0, {MACHINE}, files or commands; give"
            " a folder that doctor --record has written"
        )
    ranks = [_rank(folder, number, place) for number, place in places.items()]
    path = folder / MEASURED
    measured = Measured()
    if path.exists():
        _check_inside(folder, path)
        measured = read_json(path, Measured, error=ConfigError)
    _check_ranks(path, measured, len(ranks))
    return Examined(ranks=ranks, measured=measured)


def _json(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _ranks(folder: Path) -> dict[int, Path]:
    """Find the folder of each rank, by its number."""
    found = {}
    for path in folder.glob("rank-*"):
        number = path.name.removeprefix("rank-")
        if number.isdecimal() and len(number) < 8 and path.is_dir():
            found[int(number)] = path
    if len(found) > MOST_RANKS:
        raise ConfigError(f"{folder} has {len(found)} ranks; at most {MOST_RANKS} are read")
    if sorted(found) != list(range(len(found))):
        raise ConfigError(f"{folder} lacks a rank: there are {_short(sorted(found))}; add it")
    alone = any((folder / name).exists() for name in (MACHINE, "files", "commands"))
    return found or ({0: folder} if alone else {})


def _short(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _rank(top: Path, number: int, place: Path) -> Recording:
    machine = Machine()
    if (place / MACHINE).exists():
        _check_inside(top, place / MACHINE)
        machine = read_json(place / MACHINE, Machine, error=ConfigError)
    machine = msgspec.structs.replace(machine, rank=number)
    outputs = dict(_texts(top, place / "commands"))
    return Recording(
        machine=machine,
        files=dict(_texts(top, place / "files")),
        commands={line.removesuffix(SUFFIX): text for line, text in outputs.items()},
    )


def _texts(top: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Read every file below a folder, by its path from the top."""
    count = 0
    for above, _, names in os.walk(folder):
        for name in sorted(names):
            path, count = Path(above, name), count + 1
            if count > MOST_FILES:
                raise ConfigError(f"{folder} holds more than {MOST_FILES} files; leave some out")
            _check_inside(top, path)
            content = read_bytes(path, error=ConfigError, limit_bytes=LIMIT_BYTES)
            yield str(path.relative_to(folder)), content.decode(errors="replace")


def _check_inside(top: Path, path: Path) -> None:
    try:
        inside = path.resolve().is_relative_to(top.resolve())
    except (OSError, RuntimeError):  # links in a circle
        inside = False
    if not inside:
        raise ConfigError(f"{path} leads out of the recording; put a copy there instead of a link")


def _check_ranks(path: Path, measured: Measured, count: int) -> None:
    named = [clock.rank for clock in measured.clocks] + [one.rank for one in measured.folders]
    named += [rank for pair in measured.pairs for rank in (pair.first, pair.second)]
    wrong = next((rank for rank in named if not 0 <= rank < count), None)
    if wrong is not None:
        raise ConfigError(f"{path} names rank {wrong} of {count}; give the recording of that rank")
