"""Serialization of encoded batches, for the files of an array job and for cluster workers."""

from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard

from ms_data.building.encoders import Encoded


class EncodedBatch(msgspec.Struct, frozen=True, array_like=True):
    """The encoded documents of a batch."""

    sizes: list[int]
    """Words per document."""
    words: bytes
    """uint32 words of all documents, followed by their media words, compressed with zstd."""
    text_bytes: int
    media_sizes: list[int] = []
    """Media words per document; empty if no document has media."""


def pack_batch(texts: Sequence[str], encoded: Sequence[Encoded]) -> bytes:
    """Serialize the encoded documents of a batch as msgpack."""
    media = [np.zeros(0, np.uint32) if doc.media is None else doc.media for doc in encoded]
    words = np.concatenate([*(doc.words for doc in encoded), *media, np.zeros(0, np.uint32)])
    words = words.astype("<u4")
    content = zstandard.ZstdCompressor(level=1).compress(words.tobytes())
    text_bytes = sum(len(text.encode()) for text in texts)
    sizes, media_sizes = [len(doc.words) for doc in encoded], [len(words) for words in media]
    batch = EncodedBatch(sizes, content, text_bytes, media_sizes if any(media_sizes) else [])
    return msgspec.msgpack.encode(batch)


def unpack_batch(content: bytes) -> Sequence[Encoded]:
    """Deserialize the documents of a batch."""
    batch = msgspec.msgpack.decode(content, type=EncodedBatch)
    sizes = [*batch.sizes, *batch.media_sizes]
    total = sum(sizes)
    raw = zstandard.ZstdDecompressor().decompress(batch.words, max_output_size=4 * total)
    parts = np.split(np.frombuffer(raw, "<u4"), np.cumsum(sizes))
    count = len(batch.sizes)
    media = parts[count : len(sizes)]
    return [
        Encoded(words, media[index] if media and len(media[index]) else None)
        for index, words in enumerate(parts[:count])
    ]
