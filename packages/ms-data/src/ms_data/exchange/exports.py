"""Exports a split of shards to the formats of other libraries."""

import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.arguments import shown
from ms_data.corpus.arguments import check_paths
from ms_data.disk.split import Split
from ms_data.errors import OutputError, SettingError, printable
from ms_data.exchange.megatron import was_interrupted, write_megatron
from ms_data.files.durable import publish, replace, sync_folder, sync_tree, writing
from ms_data.files.untrusted import check_path
from ms_data.tokenization.tokenizer import Tokenizer

Format = Literal["megatron", "parquet", "datasets"]

_ROWS_BYTES = 16 << 20
"""Size of a table in memory: tokens and text."""
_ARROW_BYTES = 500 << 20
"""Approximate size of an Arrow file in a folder of `datasets`."""
_FEATURES = {
    "text": {"dtype": "large_string", "_type": "Value"},
    "tokens": {"feature": {"dtype": "uint32", "_type": "Value"}, "_type": "LargeList"},
}
"""Column types in `dataset_info.json` of `datasets`."""


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an export."""

    files: tuple[str, ...]
    documents: int
    tokens: int
    size_bytes: int


def export_dataset(
    shards: str | Path, *, out: str | Path, target: Format, split: str = "train"
) -> Exported:
    """Export the documents of a split, in order and with their end-of-text tokens.

    Args:
        shards: folder of text shards.
        out: for `megatron`, the PREFIX of PREFIX.bin and PREFIX.idx; for `parquet`, the file, with
            columns `text` (string, decoded by the tokenizer) and `tokens` (list of uint32); for
            `datasets`, a folder with these columns for `datasets.load_from_disk`.
        target: `megatron`, or with the extra `parquet` also `parquet` or `datasets`.
        split: `train` or `held_out`.

    Raises:
        SettingError: unknown target or split, or pyarrow is not installed.
        DamageError: a shard is damaged.
        OutputError: a file exists already, or cannot be written.
    """
    check_paths(out, written=None, shards=shards)
    if not isinstance(target, str) or target not in get_args(Format):
        raise SettingError(f"target must be megatron, parquet or datasets, got {shown(target)}")
    source = Split(shards, split)
    out_path = Path(out)
    megatron_files = [Path(f"{out_path}.bin"), Path(f"{out_path}.idx")]
    files = megatron_files if target == "megatron" else [out_path]
    for path in files:
        written: Literal["file", "folder"] = "folder" if target == "datasets" else "file"
        check_path("out", path, error=OutputError, written=written)
    with writing(out_path):
        # The two Megatron files cannot appear at once, so a killed export leaves a mark.
        is_resume = target == "megatron" and was_interrupted(out_path)
        for path in files:
            if path.exists() and not is_resume:
                raise OutputError(f"{printable(path)} exists; use another name, or remove it")
        out_path.parent.mkdir(parents=True, exist_ok=True)
    ends = source.all_ends()
    if target == "parquet":
        _write_parquet(out_path, source, ends, Tokenizer.load(shards))
    elif target == "datasets":
        _write_datasets(out_path, source, ends, Tokenizer.load(shards))
        files = sorted(out_path.iterdir())
    else:
        lengths = np.diff(ends, prepend=0).tolist()
        documents = _documents(source, ends)
        write_megatron(out_path, documents, lengths, vocabulary_size=source.index.vocabulary_size)
    return Exported(
        files=tuple(map(str, files)),
        documents=len(ends),
        tokens=source.tokens,
        size_bytes=sum(path.stat().st_size for path in files),
    )


def _documents(source: Split, ends: NDArray[np.int64]) -> Iterator[NDArray[np.unsignedinteger]]:
    begin = 0
    for end in ends.tolist():
        yield source.read(begin, end)
        begin = end


def _write_parquet(
    path: Path, source: Split, ends: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    arrow, parquet = _pyarrow("pyarrow"), _pyarrow("pyarrow.parquet")

    def write(file: object) -> None:
        with parquet.ParquetWriter(file, _schema(arrow), compression="zstd") as writer:
            for table in _tables(arrow, source, ends, tokenizer):
                writer.write_table(table)

    replace(path, write)


def _write_datasets(
    folder: Path, source: Split, ends: NDArray[np.int64], tokenizer: Tokenizer
) -> None:
    """Write the folder that `datasets.Dataset.save_to_disk` would write."""
    arrow, ipc = _pyarrow("pyarrow"), _pyarrow("pyarrow.ipc")
    # Renamed when it is complete; a killed export leaves only this folder.
    partial = folder.with_name(folder.name + ".partial")
    with writing(folder):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        tables = _tables(arrow, source, ends, tokenizer)
        table, names = next(tables, None), list[str]()
        while table is not None:
            names.append(f"data-{len(names):05d}.arrow")
            with ipc.new_stream(partial / names[-1], _schema(arrow)) as writer:
                size = 0
                while table is not None and size < _ARROW_BYTES:
                    writer.write_table(table)
                    size += table.nbytes
                    table = next(tables, None)
        state: dict[str, Any] = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": source.index.fingerprint[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (partial / "state.json").write_bytes(msgspec.json.encode(state))
        (partial / "dataset_info.json").write_bytes(msgspec.json.encode({"features": _FEATURES}))
        sync_tree(partial)
        publish(partial, folder)
        sync_folder(folder.parent)


def _pyarrow(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise SettingError(
            "exporting tables needs pyarrow; pip install 'ms-data[parquet]'"
        ) from error


def _schema(arrow: Any) -> Any:
    fields = [("text", arrow.large_string()), ("tokens", arrow.large_list(arrow.uint32()))]
    return arrow.schema(fields)


def _tables(
    arrow: Any, source: Split, ends: NDArray[np.int64], tokenizer: Tokenizer
) -> Iterator[Any]:
    """Yield the documents as tables of about `_ROWS_BYTES`; an empty table if there are none."""
    texts: list[str] = []
    tokens: list[NDArray[np.unsignedinteger]] = []
    size = 0

    def table() -> Any:
        lengths = np.cumsum([0, *map(len, tokens)], dtype=np.int64)  # offsets, (documents + 1,)
        flat = np.concatenate([*tokens, np.zeros(0, np.uint32)]).astype(np.uint32)
        # Offsets and values, without a Python object per token.
        lists = arrow.LargeListArray.from_arrays(arrow.array(lengths), arrow.array(flat))
        columns = [arrow.array(texts, arrow.large_string()), lists]
        return arrow.Table.from_arrays(columns, schema=_schema(arrow))

    for document in _documents(source, ends):
        tokens.append(document)
        texts.append(tokenizer.decode(document))
        size += 4 * len(document) + len(texts[-1])
        if size >= _ROWS_BYTES:
            yield table()
            texts, tokens, size = [], [], 0
    yield table()
