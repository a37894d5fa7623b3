"""Exports a split of shards to the formats of other libraries."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.arguments import shown
from ms_data.corpus.arguments import check_paths
from ms_data.disk.split import Split
from ms_data.errors import OutputError, SettingError, printable
from ms_data.exchange.megatron import was_interrupted, write_megatron
from ms_data.files.durable import replace, writing
from ms_data.files.untrusted import check_path
from ms_data.tokenization.tokenizer import Tokenizer

Format = Literal["megatron", "parquet"]

_ROWS_BYTES = 16 << 20
"""Size of a Parquet batch: tokens and text."""


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
            columns `text` (string, decoded by the tokenizer) and `tokens` (list of uint32).
        target: `megatron` or `parquet` (extra `parquet`).
        split: `train` or `held_out`.

    Raises:
        SettingError: unknown target or split, or pyarrow is not installed.
        DamageError: a shard is damaged.
        OutputError: a file exists already, or cannot be written.
    """
    check_paths(out, written=None, shards=shards)
    if not isinstance(target, str) or target not in get_args(Format):
        raise SettingError(f"target must be megatron or parquet, got {shown(target)}")
    source = Split(shards, split)
    out_path = Path(out)
    files = (
        [out_path] if target == "parquet" else [Path(f"{out_path}.bin"), Path(f"{out_path}.idx")]
    )
    for path in files:
        check_path("out", path, error=OutputError, written="file")
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
    try:
        pa, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise SettingError(
            "exporting Parquet needs pyarrow; pip install 'ms-data[parquet]'"
        ) from error
    schema = pa.schema([("text", pa.large_string()), ("tokens", pa.large_list(pa.uint32()))])

    def write(file: object) -> None:
        texts: list[str] = []
        tokens: list[NDArray[np.unsignedinteger]] = []
        size = 0

        def flush() -> None:
            lengths = np.cumsum([0, *map(len, tokens)], dtype=np.int64)  # offsets, (documents + 1,)
            flat = np.concatenate([*tokens, np.zeros(0, np.uint32)]).astype(np.uint32)
            # Offsets and values, without a Python object per token.
            lists = pa.LargeListArray.from_arrays(pa.array(lengths), pa.array(flat))
            columns = [pa.array(texts, pa.large_string()), lists]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))

        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for document in _documents(source, ends):
                tokens.append(document)
                texts.append(tokenizer.decode(document))
                size += 4 * len(document) + len(texts[-1])
                if size >= _ROWS_BYTES:
                    flush()
                    texts, tokens, size = [], [], 0
            flush()

    replace(path, write)
