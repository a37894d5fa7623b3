"""Entry point of cluster workers, which tokenize the batches of a build."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ms_data.building.answers import pack_batch
from ms_data.building.encoders import Encoded, EncoderSetup, TextEncoder, encode_rows
from ms_data.building.media import encode_media_rows
from ms_data.tokenization.tokenizer import Tokenizer


def prepare(setup: bytes) -> Callable[[bytes], bytes]:
    """Return the function that encodes a batch of texts; request and result are msgpack."""
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
) -> Callable[[Sequence[str]], Sequence[Encoded]]:
    if setup.document_kind == "text":
        words = tokenizer.word_encoder() if setup.by_words else None
        return TextEncoder(
            tokenizer=tokenizer, words=words, library_reason=setup.library_reason
        ).encode
    if setup.document_kind == "media":
        return partial(encode_media_rows, tokenizer, tokens=setup.media_tokens)
    return partial(encode_rows, tokenizer, pairs=setup.document_kind == "preferences")
