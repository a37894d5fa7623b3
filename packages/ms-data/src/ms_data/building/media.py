"""Builds conversations with pictures and sound: their text as words, their files beside it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import xxhash
from attrs import frozen

from ms_data.building.encoders import ChatDocument, ChatEncoder, Encoded, TextEncoder, as_json
from ms_data.chat.messages import read_conversation
from ms_data.corpus.find import CorpusName
from ms_data.corpus.places import is_remote
from ms_data.disk.format import MEDIA_FILE, Kind
from ms_data.disk.media import PlacedItem, pack_media
from ms_data.disk.samples import Sample, pack_media_sample
from ms_data.errors import SettingError, TokenizerError
from ms_data.media.parts import MediaKind, take_media
from ms_data.media.processor import MediaItem, Processor
from ms_data.tokenization.tokenizer import Tokenizer


class _MediaDocument(ChatDocument, frozen=True, array_like=True):
    """A conversation once its template has run, and its pictures and sounds."""

    media: tuple[MediaItem, ...] = ()


@frozen(kw_only=True)
class MediaEncoder(ChatEncoder):
    """Turns rows with pictures and sound into words, and into the words of their files."""

    processor: Processor
    kind: Kind = "media"

    @property
    def digest(self) -> str:  # noqa: D102 - as in the base class, like all that follows
        settings = f"{super().digest} {self.processor.digest}"
        return xxhash.xxh3_128_hexdigest(settings.encode())

    @property
    def media_tokens(self) -> dict[MediaKind, str]:  # noqa: D102
        return self.processor.tokens

    def files(self) -> dict[str, bytes]:  # noqa: D102
        return {**super().files(), MEDIA_FILE: self.processor.settings.encode()}

    def parse(self, row: Mapping[str, Any]) -> str:
        """Make the text of a document from one row; decode its pictures and sounds once.

        Raises:
            ValueError: the row is of no known form, the template refuses it or prints another
                number of pictures or sounds than it has, or one of them cannot be read.
        """
        one = read_conversation(row)
        messages, files = take_media(one.messages, self.processor.folder)
        media = [self.processor.measure(file) for file in files]
        rendered = self.render(messages, one.tools, 0)
        held = Counter(item.kind for item in media)
        for kind, token in self.processor.tokens.items():
            if (printed := rendered.text.count(token)) != held[kind]:
                raise ValueError(
                    f"the chat template prints {token!r} {printed} times for {held[kind]} parts "
                    f"of type {kind!r}; take the model's own template"
                )
        return as_json(_MediaDocument([rendered], one.weight, 0.0, tuple(media)))

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:  # noqa: D102
        return encode_media_rows(self.tokenizer, texts, tokens=self.media_tokens)

    def hold_out_key(self, text: str) -> str:  # noqa: D102
        return as_json(msgspec.structs.replace(_decode(text), weight=1.0))


def encode_media_rows(
    tokenizer: Tokenizer, texts: Sequence[str], *, tokens: Mapping[MediaKind, str]
) -> Sequence[Encoded]:
    """Turn rows whose template has run into the words of conversations and of their media.

    Args:
        tokenizer: one that has `tokens` as special ones.
        texts: what `MediaEncoder.parse` made.
        tokens: the token of each kind of media.

    Raises:
        TokenizerError: a text has another number of these tokens than it has media.
    """
    rows = [_decode(text) for text in texts]
    found = tokenizer.encode_chats([row.parts[0] for row in rows])
    return [
        _encoded(tokenizer, Sample(ids, mask, row.weight), row.media, tokens)
        for row, (ids, mask) in zip(rows, found, strict=True)
    ]


def _encoded(
    tokenizer: Tokenizer,
    sample: Sample,
    media: Sequence[MediaItem],
    tokens: Mapping[MediaKind, str],
) -> Encoded:
    """Repeat the token of each picture and sound as often as it has tokens."""
    if not media:
        return Encoded(pack_media_sample(sample))
    repeats = np.ones(len(sample.tokens), np.int64)
    mask = sample.loss_mask.copy()
    places: list[tuple[int, MediaItem]] = []
    for kind, token in tokens.items():
        items = [item for item in media if item.kind == kind]
        at = np.flatnonzero(sample.tokens == tokenizer.special_token(token))
        if len(at) != len(items):
            raise TokenizerError(
                f"makes {len(at)} tokens {token!r} of a text with {len(items)}; it must be a "
                "special token of the tokenizer; take the model's own"
            )
        repeats[at] = [item.tokens for item in items]
        mask[at] = False
        places += zip(at.tolist(), items, strict=True)
    starts = np.cumsum(repeats) - repeats
    placed = [PlacedItem(item, int(starts[at])) for at, item in sorted(places, key=_first)]
    whole = Sample(np.repeat(sample.tokens, repeats), np.repeat(mask, repeats), sample.weight)
    return Encoded(pack_media_sample(whole), pack_media(placed))


def with_media(
    encoder: TextEncoder, processor: str | Path | Processor | None, corpus: CorpusName
) -> TextEncoder:
    """Make an encoder read pictures and sound too, if there is a processor for them.

    Args:
        encoder: of conversations.
        processor: or the folder of its settings.
        corpus: paths in messages are relative to it, if it is one folder or file here.

    Raises:
        SettingError: the encoder is of text or of pairs, which have none.
        TokenizerError: the processor cannot be read, or its tokens are no special ones.
    """
    if processor is None:
        return encoder
    if not isinstance(encoder, ChatEncoder) or encoder.kind != "conversations":
        raise SettingError("processor needs conversations; give `chat`, and no `pairs`")
    if not isinstance(processor, Processor):
        processor = Processor.load(processor)
    if processor.folder is None:
        processor = attrs.evolve(processor, folder=_folder_of(corpus))
    for token in processor.tokens.values():
        encoder.tokenizer.special_token(token)
    return MediaEncoder(
        template=encoder.template,
        tokenizer=encoder.tokenizer,
        allow_special=encoder.allow_special,
        processor=processor,
    )


def _folder_of(corpus: CorpusName) -> Path | None:
    """The folder that the one file of a corpus lies in, or that it is."""
    if not isinstance(corpus, str | Path):
        if len(corpus) != 1:
            return None
        corpus = corpus[0]
    if is_remote(str(corpus)):
        return None
    path = Path(corpus)
    return path if path.is_dir() else path.parent


def _decode(text: str) -> _MediaDocument:
    return msgspec.json.decode(text, type=_MediaDocument)


def _first(place: tuple[int, MediaItem]) -> int:
    return place[0]
