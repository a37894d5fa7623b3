"""Makes shards of a dataset that another library wrote."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ms_data.corpus.arguments import check_paths
from ms_data.disk.format import FRAME_BYTES, Index, encode_index, token_type_for
from ms_data.disk.inspection import DatasetInfo, inspect
from ms_data.disk.writer import DatasetWriter
from ms_data.errors import CorpusError, printable
from ms_data.exchange.mds import MdsReader, Value
from ms_data.exchange.megatron import MegatronReader
from ms_data.files.durable import publish, sync_folder, write_file
from ms_data.files.work_folder import free_place, work_folder
from ms_data.settings.arguments import check_counts
from ms_data.tokenization.tokenizer import Tokenizer


class Imported(DatasetInfo, frozen=True, kw_only=True):
    """What was made of a dataset, and what became of its documents.

    The documents that were written are documents_in - empty + further.
    """

    documents_in: int
    """Documents, or rows, of the dataset that was read."""
    empty: int
    """Those without a token or text, which are no documents."""
    further: int
    """Documents that begin behind an end of text within another."""


_OURS = re.compile(r"(shard-\d{5,}\.msd|index\.json|tokenizer\.json)(\.partial)?")
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
    """Make shards of Megatron's `.bin` and `.idx`, or of a folder of MDS.

    Tokens are taken as they are: a document that does not end in the tokenizer's end of text is
    given one, and one with an end of text in its midst is several. Text is tokenized.

    Args:
        source: PREFIX.idx with PREFIX.bin beside it, or a folder with MDS's index.json.
        tokenizer: the one that made the tokens, or is to.
        out: the folder to make.
        column: of MDS, the one that holds the text or the tokens.
        shard_size_mib: a shard is closed at the first document end past this size.
        on_progress: called with the bytes that are done, and all.

    Raises:
        SettingError: an argument is out of range.
        CorpusError: the source is missing, damaged or empty, or has unknown tokens.
        TokenizerError: the tokenizer cannot be read.
        OutputError: `out` cannot be written, or holds something else.
    """
    check_paths(out, source=source, tokenizer=tokenizer)
    check_counts(shard_size_mib=shard_size_mib)
    model = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    path = Path(source)
    reader = MdsReader(path, column) if os.path.isdir(path) else MegatronReader(path)
    folder = free_place(out)
    aside = folder.with_name(folder.name + ".partial")
    with work_folder(aside, _OURS):
        counts = _write(aside, reader, model, shard_size_mib << 20, on_progress)
        sync_folder(aside)
        publish(aside, folder)
    made = msgspec.structs.asdict(inspect(out))
    return Imported(
        **made,
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
    """Write the dataset; return what became of the documents that were read."""
    counts = {"read": 0, "empty": 0, "further": 0}
    kind = token_type_for(tokenizer.vocabulary_size)
    frame_tokens = FRAME_BYTES // np.dtype(kind).itemsize
    for path in folder.iterdir():
        path.unlink()
    writer = DatasetWriter(
        folder, token_type=kind, frame_tokens=frame_tokens, shard_size_bytes=shard_size_bytes
    )
    try:
        done = 0
        for place, tokens, size in _encoded(reader.documents(), tokenizer):
            written = 0
            for document in _documents(tokens, tokenizer, place):
                writer.append("train", document)
                written += 1
            counts["read"] += 1
            counts["empty"] += not written
            counts["further"] += max(0, written - 1)
            done += size
            on_progress(done, reader.size_bytes)
        shards = writer.close()
    finally:
        writer.abandon()
    if not shards:
        raise CorpusError("the dataset is empty: it holds no document; give one that does")
    write_file(folder / "tokenizer.json", tokenizer.content)
    index = Index(
        token_type=kind,
        frame_tokens=frame_tokens,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_text=tokenizer.end_of_text,
        tokenizer=tokenizer.digest,
        hold_out=0.0,
        shards=shards,
    )
    write_file(folder / "index.json", encode_index(index))
    return counts


def _encoded(
    documents: Iterator[tuple[str, Value]], tokenizer: Tokenizer
) -> Iterator[tuple[str, NDArray[np.integer], int]]:
    """Yield each document's place, tokens and size in bytes; texts are tokenized in batches."""
    texts: list[tuple[str, str]] = []
    waiting = 0

    def encode() -> Iterator[tuple[str, NDArray[np.integer], int]]:
        for (place, text), tokens in zip(
            texts, tokenizer.encode_documents([text for _, text in texts]), strict=True
        ):
            yield place, tokens if text else tokens[:0], len(text.encode())

    for place, value in documents:
        if not isinstance(value, str):
            yield place, value, value.nbytes
        else:
            texts.append((place, value))
            waiting += len(value)
        if waiting >= _BATCH_CHARACTERS:
            yield from encode()
            texts, waiting = [], 0
    yield from encode()


def _documents(
    tokens: NDArray[np.integer], tokenizer: Tokenizer, place: str
) -> Iterator[NDArray[np.integer]]:
    """Cut tokens into documents that end in the end of text."""
    if not len(tokens):
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= tokenizer.vocabulary_size:
        wrong = least if least < 0 else most
        raise CorpusError(
            f"{printable(place)} has the token {wrong}, which a tokenizer of "
            f"{tokenizer.vocabulary_size} tokens lacks; give the tokenizer that made it"
        )
    ends = np.flatnonzero(tokens == tokenizer.end_of_text) + 1
    for part in np.split(tokens, ends):
        if not len(part):
            continue
        if part[-1] != tokenizer.end_of_text:
            part = np.append(part, np.array(tokenizer.end_of_text, part.dtype))
        yield part
