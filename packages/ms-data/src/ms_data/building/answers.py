"""Encoded batches, as a job of an array keeps them and a process of a cluster sends them."""

from collections.abc import Sequence

import msgspec
import numpy as np
import zstandard

from ms_data.building.encoders import Encoded


class EncodedBatch(msgspec.Struct, frozen=True, array_like=True):
    """The words that a batch was encoded to."""

    sizes: list[int]
    """Words of each document."""
    words: bytes
    """Words of all documents, as uint32, packed by zstd; then those of their pictures and
    sounds."""
    text_bytes: int
    media_sizes: list[int] = []
    """Words of the pictures and sounds of each document, if any document has them."""


def packed(texts: Sequence[str], encoded: Sequence[Encoded]) -> bytes:
    """Pack encoded documents as the answer to a batch, in msgpack."""
    media = [np.zeros(0, np.uint32) if one.media is None else one.media for one in encoded]
    words = np.concatenate([*(one.words for one in encoded), *media, np.zeros(0, np.uint32)])
    words = words.astype("<u4")
    content = zstandard.ZstdCompressor(level=1).compress(words.tobytes())
    text_bytes = sum(len(text.encode()) for text in texts)
    sizes, of_media = [len(one.words) for one in encoded], [len(one) for one in media]
    answer = EncodedBatch(sizes, content, text_bytes, of_media if any(of_media) else [])
    return msgspec.msgpack.encode(answer)


def unpacked(content: bytes) -> Sequence[Encoded]:
    """Unpack the documents of an answer."""
    answer = msgspec.msgpack.decode(content, type=EncodedBatch)
    sizes = [*answer.sizes, *answer.media_sizes]
    total = sum(sizes)
    raw = zstandard.ZstdDecompressor().decompress(answer.words, max_output_size=4 * total)
    parts = np.split(np.frombuffer(raw, "<u4"), np.cumsum(sizes))
    count = len(answer.sizes)
    beside = parts[count : len(sizes)]
    return [
        Encoded(words, beside[at] if beside and len(beside[at]) else None)
        for at, words in enumerate(parts[:count])
    ]
