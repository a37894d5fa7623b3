"""Corpus to shards."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import xxhash

from ms_data.durable import publish, sync_folder, write_file, writing
from ms_data.errors import CorpusError, OutputError, SettingError
from ms_data.format import FRAME_BYTES, Index, ShardEntry, encode_index, token_type_for
from ms_data.readers import Corpus, Document, find_corpus
from ms_data.shard import ShardWriter
from ms_data.tokenizer import Tokenizer

__all__ = ["Summary", "build"]

BATCH_CHARACTERS = 1 << 22


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a build wrote."""

    folder: str
    documents: int
    tokens: int
    shards: int
    size_bytes: int
    text_bytes: int
    skipped: int
    splits: dict[str, int]
    """Tokens in each split."""


def build(
    corpus: str | Path,
    *,
    tokenizer: str | Path | Tokenizer,
    out: str | Path,
    hold_out: float = 0.0,
    shard_size_mib: int = 64,
    text_key: str = "text",
    skip_invalid: bool = False,
) -> Summary:
    """Tokenizes a corpus into a folder of shards."""
    if not 0.0 <= hold_out < 1.0:
        raise SettingError(f"hold_out {hold_out} is not a share from 0 to below 1")
    source = find_corpus(corpus, text_key=text_key, skip_invalid=skip_invalid)
    encoder = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is not empty; choose another folder")
    aside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    with writing(aside):
        aside.mkdir(parents=True)
        summary = _build(source, encoder, aside, folder, hold_out, shard_size_mib << 20)
        sync_folder(aside)
        publish(aside, folder)
    return summary


def _build(
    source: Corpus, encoder: Tokenizer, aside: Path, folder: Path, hold_out: float, limit: int
) -> Summary:
    kind = token_type_for(encoder.vocabulary_size)
    frame_tokens = FRAME_BYTES // (2 if kind == "uint16" else 4)
    entries: list[ShardEntry] = []
    writers: dict[str, tuple[str, ShardWriter]] = {}
    skipped: list[str] = []
    count = text_bytes = 0
    for batch in _batches(source, skipped.append):
        texts = [document.text for document in batch]
        for text, tokens in zip(texts, encoder.encode_documents(texts), strict=True):
            encoded = text.encode()
            text_bytes += len(encoded)
            held = xxhash.xxh3_64_intdigest(encoded) < hold_out * 2.0**64
            split = "held_out" if held else "train"
            if split not in writers:
                name = f"shard-{count:05d}.msd"
                count += 1
                file = (aside / name).open("wb")
                writers[split] = (
                    name,
                    ShardWriter(file, token_type=kind, frame_tokens=frame_tokens),
                )
            name, writer = writers[split]
            writer.append(tokens)
            if writer.size_bytes >= limit:
                entries.append(writer.close(name, split))
                del writers[split]
    for split, (name, writer) in writers.items():
        entries.append(writer.close(name, split))
    if not entries:
        raise CorpusError(f"{source.name} is empty: no text in its {len(source.files)} files")
    write_file(aside / "tokenizer.json", encoder.content)
    index = Index(
        token_type=kind,
        frame_tokens=frame_tokens,
        vocabulary_size=encoder.vocabulary_size,
        end_of_text=encoder.end_of_text,
        tokenizer=encoder.digest,
        hold_out=hold_out,
        shards=tuple(sorted(entries, key=lambda entry: entry.name)),
    )
    write_file(aside / "index.json", encode_index(index))
    splits: dict[str, int] = {}
    for entry in index.shards:
        splits[entry.split] = splits.get(entry.split, 0) + entry.tokens
    return Summary(
        folder=str(folder),
        documents=sum(entry.documents for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        shards=len(entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        text_bytes=text_bytes,
        skipped=len(skipped),
        splits=splits,
    )


def _batches(source: Corpus, on_skip: Callable[[str], None]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in source.documents(on_skip=on_skip):
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
