"""Imports a dataset of another library as shards."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.arguments import check_callable
from ms_data.corpus.arguments import check_paths
from ms_data.disk.format import FRAME_BYTES, Index, encode_index, token_type_for
from ms_data.disk.inspection import DatasetInfo, inspect
from ms_data.disk.writer import DatasetWriter
from ms_data.errors import CorpusError, SettingError, printable
from ms_data.exchange.mds import MdsReader, Value
from ms_data.exchange.megatron import MegatronReader
from ms_data.files.durable import publish, sync_folder, write_file
from ms_data.files.untrusted import check_path
from ms_data.files.work_folder import resolve_output, work_folder
from ms_data.settings.arguments import check_counts
from ms_data.tokenization.tokenizer import Tokenizer


class Imported(DatasetInfo, frozen=True, kw_only=True):
    """Description of the new dataset, with the outcome of the source documents.

    The number of written documents is documents_in - empty + further.
    """

    documents_in: int
    """Documents or rows of the source."""
    empty: int
    """Source documents without tokens or text."""
    further: int
    """Additional documents, split off at an end-of-text token inside another."""


_IMPORT_FILES = re.compile(r"(shard-\d{5,}\.msd|index\.json|tokenizer\.json)(\.partial)?")
_BATCH_CHARACTERS = 1 << 20


def import_dataset(
    source: str | Path,
    *,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    column: str = "text",
    shard_size_mib: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Imported:
    """Convert Megatron `.bin` and `.idx` files, or a folder of MDS, to shards.

    Tokens are not changed. A document without the tokenizer's end-of-text token at its end gets
    one, and a document with one inside is split there. Text is tokenized.

    Args:
        source: PREFIX.idx, with PREFIX.bin in the same folder, or a folder with MDS's index.json.
        tokenizer: the tokenizer that encoded the tokens, or will encode the text.
        out: output folder.
        column: MDS column with the text or the tokens.
        shard_size_mib: a shard is closed at the first document end past this size.
        on_progress: called with the bytes done and the total.

    Raises:
        SettingError: an argument is invalid.
        CorpusError: the source is missing, damaged or empty, or has unknown tokens.
        TokenizerError: the tokenizer cannot be read.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_callable("on_progress", on_progress, error=SettingError)
    check_path("source", source, error=SettingError)
    check_paths(out, source=source, tokenizer=tokenizer)
    check_counts(shard_size_mib=shard_size_mib)
    model = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    path = Path(source)
    reader = MdsReader(path, column) if os.path.isdir(path) else MegatronReader(path)
    folder = resolve_output(out)
    partial = folder.with_name(folder.name + ".partial")
    with work_folder(partial, _IMPORT_FILES):
        counts = _write(partial, reader, model, shard_size_mib << 20, on_progress)
        sync_folder(partial)
        publish(partial, folder)
    info = msgspec.structs.asdict(inspect(out))
    return Imported(
        **info,
        documents_in=counts["read"],
        empty=counts["empty"],
        further=counts["further"],
    )


def _write(
    folder: Path,
    reader: MdsReader | MegatronReader,
    tokenizer: Tokenizer,
    shard_size_bytes: int,
    on_progress: Callable[[int, int], None],
) -> dict[str, int]:
    """Write the dataset; return the counts of the outcome."""
    counts = {"read": 0, "empty": 0, "further": 0}
    token_type = token_type_for(tokenizer.vocabulary_size)
    frame_tokens = FRAME_BYTES // np.dtype(token_type).itemsize
    for path in folder.iterdir():  # an interrupted import cannot be resumed
        path.unlink()
    writer = DatasetWriter(
        folder, token_type=token_type, frame_tokens=frame_tokens, shard_size_bytes=shard_size_bytes
    )
    try:
        bytes_done = 0
        for location, tokens, size in _encode_documents(reader.documents(), tokenizer):
            written = 0
            for document in _split_documents(tokens, tokenizer, location):
                # Other formats have no held-out documents, so all go into one split.
                writer.append("train", document)
                written += 1
            counts["read"] += 1
            counts["empty"] += not written
            counts["further"] += max(0, written - 1)  # split off at inner end-of-text tokens
            bytes_done += size
            on_progress(bytes_done, reader.size_bytes)
        shards = writer.close()
    finally:
        writer.abandon()  # does nothing after `close`
    if not shards:
        raise CorpusError("the dataset is empty: it holds no documents; use a dataset with text")
    write_file(folder / "tokenizer.json", tokenizer.content)
    index = Index(
        token_type=token_type,
        frame_tokens=frame_tokens,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=tokenizer.digest,
        held_out_fraction=0.0,
        shards=shards,
    )
    write_file(folder / "index.json", encode_index(index))
    return counts


def _encode_documents(
    documents: Iterator[tuple[str, Value]], tokenizer: Tokenizer
) -> Iterator[tuple[str, NDArray[np.integer], int]]:
    """Yield location, tokens and size in bytes of all documents; texts are tokenized in batches."""
    texts: list[tuple[str, str]] = []
    pending_characters = 0

    def encode() -> Iterator[tuple[str, NDArray[np.integer], int]]:
        for (location, text), tokens in zip(
            texts, tokenizer.encode_documents([text for _, text in texts]), strict=True
        ):
            # An empty text would become a document of the end-of-text token alone.
            yield location, tokens if text else tokens[:0], len(text.encode())

    for location, value in documents:
        if not isinstance(value, str):
            yield location, value, value.nbytes
        else:
            texts.append((location, value))
            pending_characters += len(value)
        if pending_characters >= _BATCH_CHARACTERS:
            yield from encode()
            texts, pending_characters = [], 0
    yield from encode()


def _split_documents(
    tokens: NDArray[np.integer], tokenizer: Tokenizer, location: str
) -> Iterator[NDArray[np.integer]]:
    """Split tokens into documents that end with the end-of-text token."""
    if not len(tokens):
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= tokenizer.vocabulary_size:
        invalid = low if low < 0 else high
        raise CorpusError(
            f"{printable(location)} has the token {invalid}, but the tokenizer has only "
            f"{tokenizer.vocabulary_size} tokens; pass the tokenizer that encoded it"
        )
    ends = np.flatnonzero(tokens == tokenizer.end_of_text) + 1  # one past every end-of-text token
    for part in np.split(tokens, ends):
        if not len(part):
            continue
        if part[-1] != tokenizer.end_of_text:
            # Only the last part can lack its end-of-text token.
            part = np.append(part, np.array(tokenizer.end_of_text, part.dtype))
        yield part
