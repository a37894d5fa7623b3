"""Selects the data files of a folder that `datasets` or `clean` wrote, without its metadata."""

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from ms_data.corpus.places import CorpusFile, file_info, open_corpus_file
from ms_data.corpus.readers.lance import newest_manifests
from ms_data.errors import CorpusError

_INFO, _STATE, _SPLITS = "dataset_info.json", "state.json", "dataset_dict.json"
_LEDGER, _LEDGER_PART = "ledger.json", "ledger/part-00000.jsonl.zst"
_CARD = "README.md"
_CARD_FIELDS = (b"dataset_info:", b"configs:", b"task_categories:", b"license:")
_LIMIT_BYTES = 1 << 26
_CARD_BYTES = 1 << 16


class _DataFile(msgspec.Struct):
    """Entry of the shard list of a saved dataset."""

    filename: str


class _State(msgspec.Struct):
    """Shard list of a saved dataset (state.json)."""

    files: list[_DataFile] = msgspec.field(name="_data_files")
    indices: Any = msgspec.field(name="_indices_files", default=None)


class _LedgerFile(msgspec.Struct):
    """A file written by `clean` or `dedup`."""

    name: str
    size_bytes: int


class _Ledger(msgspec.Struct):
    """File list of a folder that `clean` or `dedup` wrote."""

    files: list[_LedgerFile]


class _SplitList(msgspec.Struct):
    """Split names of a saved dataset; every split has its folder."""

    splits: list[str]


def select_data_files(files: dict[str, CorpusFile], folder: object) -> dict[str, CorpusFile]:
    """Return the files of a folder that hold data.

    Args:
        files: files by their path relative to the folder, in reading order.
        folder: name of the folder, for messages.

    Raises:
        CorpusError: a listed shard of a saved dataset is missing, or it has several splits.
    """
    files = _newest_lance_versions(_drop_ledger_files(files))
    if _SPLITS in files:
        # Reading several splits as one corpus would mix training and test data.
        splits = _decode_json(files[_SPLITS], _SplitList).splits
        if len(splits) > 1:
            raise CorpusError(
                f"{folder} holds the splits {', '.join(splits)}; pass the ones to read, such as "
                f"{folder}/{splits[0]}"
            )
    processed: set[str] = set()
    data_files: dict[str, CorpusFile] = {}
    folder_paths = {_parent(name) for name in files if PurePosixPath(name).name == _STATE}
    saved_datasets = [
        folder_path for folder_path in folder_paths if _join(folder_path, _INFO) in files
    ]
    shards = {folder_path: _listed_shards(folder_path, files) for folder_path in saved_datasets}
    for name in files:
        folder_path = _parent(name)
        if folder_path in shards:
            # The folder may have files of an earlier, longer version: only listed shards count.
            data_files |= shards[folder_path]
            processed.add(name)
        elif name == _SPLITS and saved_datasets:
            processed.add(name)
    others = {name: file for name, file in files.items() if name not in processed}
    if _is_card(others.get(_CARD)):
        del others[_CARD]
    return dict(
        sorted((data_files | others).items(), key=lambda pair: PurePosixPath(pair[0]).parts)
    )


def _newest_lance_versions(files: dict[str, CorpusFile]) -> dict[str, CorpusFile]:
    """Replace the files of each Lance dataset by the manifest of its newest version."""
    newest = newest_manifests(list(files))
    return {
        name: file
        for name, file in files.items()
        if name in newest.values() or not any(name.startswith(folder) for folder in newest)
    }


def _drop_ledger_files(files: dict[str, CorpusFile]) -> dict[str, CorpusFile]:
    """Return the files without the ledgers and reports of `clean` and `dedup`."""
    folders = {_parent(name) for name in files if PurePosixPath(name).name == _LEDGER}
    ledger_folders = [folder for folder in folders if _join(folder, _LEDGER_PART) in files]
    for folder in ledger_folders:
        _check_ledger(folder, files)
    excluded = {
        name
        for folder in ledger_folders
        for name in files
        # Kept documents are data; the ledger, clusters and reports are not.
        if name.startswith(_join(folder, "")) and not name.startswith(_join(folder, "documents/"))
    }
    return {name: file for name, file in files.items() if name not in excluded}


def _check_ledger(folder: str, files: Mapping[str, CorpusFile]) -> None:
    """Check that a folder of `clean` or `dedup` is complete."""
    ledger = files[_join(folder, _LEDGER)]
    for file in _decode_json(ledger, _Ledger).files:
        actual_file = files.get(_join(folder, file.name))
        size = None if actual_file is None else file_info(actual_file).size_bytes
        if file.name.startswith("documents/") and size != file.size_bytes:
            actual = "is missing" if size is None else f"has {size} bytes"
            raise CorpusError(
                f"{ledger}: lists {file.name!r} with {file.size_bytes} bytes, but it {actual}; "
                "copy the complete folder"
            )


def _listed_shards(folder: str, files: Mapping[str, CorpusFile]) -> dict[str, CorpusFile]:
    """Return the shards that a saved dataset lists, in its order."""
    state_file = files[_join(folder, _STATE)]
    state = _decode_json(state_file, _State)
    if state.indices:
        raise CorpusError(
            f"{state_file}: the dataset selects rows by a list of indices; call "
            "`flatten_indices()` and save it again"
        )
    shards = {}
    for shard in state.files:
        name = _join(folder, shard.filename)
        # A list from elsewhere must not name files outside its folder.
        if PurePosixPath(shard.filename).name != shard.filename or name not in files:
            raise CorpusError(
                f"{state_file}: lists {shard.filename!r}, but it is missing; copy the complete "
                "folder"
            )
        shards[name] = files[name]
    return shards


def _parent(name: str) -> str:
    return str(PurePosixPath(name).parent)


def _join(folder: str, name: str) -> str:
    return name if folder == "." else f"{folder}/{name}"


def _is_card(file: CorpusFile | None) -> bool:
    """Return whether a README.md is a Hub dataset card: its YAML header has dataset fields."""
    if file is None:
        return False
    head = _read_head(file, _CARD_BYTES)
    # A dataset card starts with YAML between two `---` lines.
    fields, separator, _ = head.removeprefix(b"---\n").partition(b"\n---")
    if not head.startswith(b"---\n") or not separator:
        return False
    return any(line.startswith(_CARD_FIELDS) for line in fields.split(b"\n"))


def _decode_json(file: CorpusFile, struct_type: type[Any]) -> Any:
    content = _read_head(file, _LIMIT_BYTES + 1)  # one more byte shows that it is too large
    if len(content) > _LIMIT_BYTES:
        raise CorpusError(f"{file}: too large for a list of shards; download it again")
    try:
        return msgspec.json.decode(content, type=struct_type)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CorpusError(f"{file}: damaged ({error}); save the dataset again") from error


def _read_head(path: CorpusFile, size: int) -> bytes:
    try:
        with open_corpus_file(path) as file:
            return file.read(size)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error
