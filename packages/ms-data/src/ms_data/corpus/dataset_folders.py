"""Finds, in a folder, the shards that `datasets` or `clean` saved, without what describes them."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from ms_data.corpus.places import Place, file_info, open_place
from ms_data.errors import CorpusError

_INFO, _STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
_LEDGER, _LEDGER_PART = "ledger.json", "ledger/part-00000.jsonl.zst"
_CARD = "README.md"
_CARD_FIELDS = (b"dataset_info:", b"configs:", b"task_categories:", b"license:")
_LIMIT_BYTES = 1 << 26
_CARD_BYTES = 1 << 16


class _DataFile(msgspec.Struct):
    """A shard in the list of a saved dataset."""

    filename: str


class _State(msgspec.Struct):
    """The list of the shards of a saved dataset."""

    files: list[_DataFile] = msgspec.field(name="_data_files")
    indices: Any = msgspec.field(name="_indices_files", default=None)


class _LedgerFile(msgspec.Struct):
    """A file that `clean` or `dedup` wrote."""

    name: str
    size_bytes: int


class _Ledger(msgspec.Struct):
    """The list of the files of a folder that `clean` or `dedup` wrote."""

    files: list[_LedgerFile]


class _Splits(msgspec.Struct):
    """The splits of a saved dataset, each a folder."""

    splits: list[str]


def without_descriptions(files: dict[str, Place], folder: object) -> dict[str, Place]:
    """Return those files of a folder that hold data.

    Args:
        files: by their names below the folder, in the order of reading.
        folder: what it is called in messages.

    Raises:
        CorpusError: a saved dataset lacks a shard that it lists, or has several splits.
    """
    files = _without_ledgers(files)
    if _SPLITS in files:
        splits = _decoded(files[_SPLITS], _Splits).splits
        if len(splits) > 1:
            raise CorpusError(
                f"{folder} holds the splits {', '.join(splits)}; give those to read, as "
                f"{folder}/{splits[0]}"
            )
    left_out: set[str] = set()
    kept: dict[str, Place] = {}
    homes = {_home(name) for name in files if PurePosixPath(name).name == _STATE}
    saved = [home for home in homes if _below(home, _INFO) in files]
    shards = {home: _shards(home, files) for home in saved}
    for name in files:
        home = _home(name)
        if home in shards:
            kept |= shards[home]
            left_out.add(name)
        elif name == _SPLITS and saved:
            left_out.add(name)
    rest = {name: file for name, file in files.items() if name not in left_out}
    if _is_card(rest.get(_CARD)):
        del rest[_CARD]
    return dict(sorted((kept | rest).items(), key=lambda one: PurePosixPath(one[0]).parts))


def _without_ledgers(files: dict[str, Place]) -> dict[str, Place]:
    """Keep only the documents of folders that `clean` and `dedup` wrote."""
    homes = {_home(name) for name in files if PurePosixPath(name).name == _LEDGER}
    ours = [home for home in homes if _below(home, _LEDGER_PART) in files]
    for home in ours:
        _check_ledger(home, files)
    left_out = {
        name
        for home in ours
        for name in files
        if name.startswith(_below(home, "")) and not name.startswith(_below(home, "documents/"))
    }
    return {name: file for name, file in files.items() if name not in left_out}


def _check_ledger(home: str, files: Mapping[str, Place]) -> None:
    """Refuse a folder of `clean` or `dedup` from which documents are missing."""
    place = files[_below(home, _LEDGER)]
    for file in _decoded(place, _Ledger).files:
        found = files.get(_below(home, file.name))
        size = None if found is None else file_info(found).size_bytes
        if file.name.startswith("documents/") and size != file.size_bytes:
            there = "is not beside it" if size is None else f"has {size} bytes"
            raise CorpusError(
                f"{place}: lists {file.name!r} with {file.size_bytes} bytes, which {there}; copy "
                "the whole folder"
            )


def _shards(home: str, files: Mapping[str, Place]) -> dict[str, Place]:
    """Find the shards that the dataset in a folder lists, in its order."""
    place = files[_below(home, _STATE)]
    state = _decoded(place, _State)
    if state.indices:
        raise CorpusError(
            f"{place}: its rows are chosen by a list of indices; save the dataset again, after "
            "`flatten_indices()`"
        )
    found = {}
    for shard in state.files:
        name = _below(home, shard.filename)
        if PurePosixPath(shard.filename).name != shard.filename or name not in files:
            raise CorpusError(
                f"{place}: lists {shard.filename!r}, which is not beside it; copy the whole folder"
            )
        found[name] = files[name]
    return found


def _home(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _below(home: str, name: str) -> str:
    return name if home == "." else f"{home}/{name}"


def _is_card(place: Place | None) -> bool:
    """Return whether a README.md describes a Hub dataset: it begins with fields for machines."""
    if place is None:
        return False
    head = _head(place, _CARD_BYTES)
    fields, mark, _ = head.removeprefix(b"---\n").partition(b"\n---")
    if not head.startswith(b"---\n") or not mark:
        return False
    return any(line.startswith(_CARD_FIELDS) for line in fields.split(b"\n"))


def _decoded(place: Place, kind: type[Any]) -> Any:
    content = _head(place, _LIMIT_BYTES + 1)
    if len(content) > _LIMIT_BYTES:
        raise CorpusError(f"{place}: larger than any list of shards; fetch it again")
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CorpusError(f"{place}: damaged ({error}); save the dataset again") from error


def _head(place: Place, size: int) -> bytes:
    try:
        with open_place(place) as file:
            return file.read(size)
    except OSError as error:
        raise CorpusError(f"{place}: cannot be read: {error.strerror or error}") from error
