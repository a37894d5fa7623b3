"""Tokenizes the batches of a build: in threads of this process, or in workers that return bytes."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import zstandard

from ms_data.building.encoders import Encoded, EncoderSetup, TextEncoder, encode_rows
from ms_data.building.media import encode_media_rows
from ms_data.engine.batches import DocumentBatch, ReadBatch
from ms_data.engine.pools import Results, Work, map_threads, map_workers
from ms_data.tokenization.tokenizer import Tokenizer

EncodedDocs = Sequence[Encoded]


class EncodedBatch(msgspec.Struct, frozen=True, array_like=True):
    """The encoded documents of a batch, from a worker or in the file of an array job."""

    sizes: list[int]
    """Words per document."""
    words: bytes
    """uint32 words of all documents, followed by their media words, compressed with zstd."""
    text_bytes: int
    media_sizes: list[int] = []
    """Media words per document; empty if no document has media."""


def encode_batches(
    encoder: TextEncoder, cluster: str, folder: Path, batches: Iterator[ReadBatch]
) -> Results[EncodedDocs]:
    """Tokenize batches in order, on the Ray cluster at address `cluster`, or locally if empty."""
    if cluster:
        return map_workers(WORK, encoder.setup(), batches, workers=cluster)
    return map_threads(
        lambda batch: encoder.encode(batch.texts), batches, threads=encoder.batches_ahead
    )


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function of a worker that encodes a batch of texts; all values are msgpack."""
    encoder_setup = msgspec.msgpack.decode(setup, type=EncoderSetup)
    tokenizer = Tokenizer(encoder_setup.tokenizer, end_of_text=encoder_setup.end_of_text)
    decoder = msgspec.msgpack.Decoder(list[str])
    encode = _make_encode(encoder_setup, tokenizer)

    def work(request: bytes) -> bytes:
        texts = decoder.decode(request)
        return pack_batch(texts, encode(texts))

    return work


def _make_encode(
    setup: EncoderSetup, tokenizer: Tokenizer
) -> Callable[[Sequence[str]], EncodedDocs]:
    if setup.document_kind == "text":
        words = tokenizer.word_encoder() if setup.by_words else None
        return TextEncoder(
            tokenizer=tokenizer, words=words, library_reason=setup.library_reason
        ).encode
    if setup.document_kind == "media":
        return partial(encode_media_rows, tokenizer, tokens=setup.media_tokens)
    return partial(encode_rows, tokenizer, kind=setup.document_kind)


def pack_batch(texts: Sequence[str], encoded: EncodedDocs) -> bytes:
    """Serialize the encoded documents of a batch as msgpack."""
    media = [np.zeros(0, np.uint32) if doc.media is None else doc.media for doc in encoded]
    # The empty array makes an empty batch possible.
    words = np.concatenate([*(doc.words for doc in encoded), *media, np.zeros(0, np.uint32)])
    words = words.astype("<u4")
    content = zstandard.ZstdCompressor(level=1).compress(words.tobytes())
    text_bytes = sum(len(text.encode()) for text in texts)
    sizes, media_sizes = [len(doc.words) for doc in encoded], [len(words) for words in media]
    batch = EncodedBatch(sizes, content, text_bytes, media_sizes if any(media_sizes) else [])
    return msgspec.msgpack.encode(batch)


def unpack_batch(content: bytes) -> EncodedDocs:
    """Deserialize the documents of a batch."""
    batch = msgspec.msgpack.decode(content, type=EncodedBatch)
    sizes = [*batch.sizes, *batch.media_sizes]
    total = sum(sizes)
    # The sizes limit the output, so damaged content cannot exhaust the memory.
    raw = zstandard.ZstdDecompressor().decompress(batch.words, max_output_size=4 * total)
    # Documents, then media, then an empty remainder.
    parts = np.split(np.frombuffer(raw, "<u4"), np.cumsum(sizes))
    count = len(batch.sizes)
    media = parts[count : len(sizes)]
    return [
        Encoded(words, media[index] if media and len(media[index]) else None)
        for index, words in enumerate(parts[:count])
    ]


def _request(batch: DocumentBatch) -> bytes:
    return msgspec.msgpack.encode(batch.texts)


def _dump(batch: DocumentBatch, encoded: EncodedDocs) -> bytes:
    return pack_batch(batch.texts, encoded)


WORK: Work[EncodedDocs] = Work(
    function=f"{__name__}:prepare", request=_request, dump=_dump, load=unpack_batch, empty=[]
)
"""Tokenization of a batch in a worker."""
