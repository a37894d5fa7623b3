"""Runs in a process of a cluster: tokenizes the batches that a build sends there."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ms_data.building.answers import packed
from ms_data.building.encoders import Encoded, EncoderSetup, TextEncoder, encode_rows
from ms_data.building.media import encode_media_rows
from ms_data.tokenization.tokenizer import Tokenizer


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that turns the texts of a batch into their answer, both as msgpack."""
    made = msgspec.msgpack.decode(setup, type=EncoderSetup)
    tokenizer = Tokenizer(made.tokenizer, end_of_text=made.end_of_text)
    decoder = msgspec.msgpack.Decoder(list[str])
    encode = _encoder(made, tokenizer)

    def work(request: bytes) -> bytes:
        texts = decoder.decode(request)
        return packed(texts, encode(texts))

    return work


def _encoder(
    made: EncoderSetup, tokenizer: Tokenizer
) -> Callable[[Sequence[str]], Sequence[Encoded]]:
    if made.kind == "text":
        words = tokenizer.word_encoder() if made.by_words else None
        return TextEncoder(tokenizer=tokenizer, words=words, why_library=made.why_library).encode
    if made.kind == "media":
        return partial(encode_media_rows, tokenizer, tokens=made.media_tokens)
    return partial(encode_rows, tokenizer, pairs=made.kind == "preferences")
