"""Encodes conversations with images, audio and video: text as words, files as media documents."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import xxhash
from attrs import frozen

from ms_data.building.encoders import ChatDocument, ChatEncoder, Encoded, TextEncoder, document_json
from ms_data.chat.messages import read_conversation
from ms_data.corpus.find import CorpusName
from ms_data.corpus.places import is_remote
from ms_data.disk.format import MEDIA_FILE, DocumentKind
from ms_data.disk.media import PlacedItem, pack_media
from ms_data.disk.samples import Sample, pack_media_sample
from ms_data.errors import SettingError, TokenizerError
from ms_data.media.parts import MediaKind, extract_media
from ms_data.media.processor import MediaItem, Processor
from ms_data.tokenization.tokenizer import Tokenizer


class _MediaDocument(ChatDocument, frozen=True, array_like=True):
    """A rendered conversation with its images, audio and video."""

    media: tuple[MediaItem, ...] = ()


@frozen(kw_only=True)
class MediaEncoder(ChatEncoder):
    """Encodes rows with images, audio and video."""

    processor: Processor
    document_kind: DocumentKind = "media"

    @property
    def digest(self) -> str:  # noqa: D102 - documented in the base class, like the next ones
        settings = f"{super().digest} {self.processor.digest}"
        return xxhash.xxh3_128_hexdigest(settings.encode())

    @property
    def media_tokens(self) -> dict[MediaKind, str]:  # noqa: D102
        return self.processor.tokens

    def files(self) -> dict[str, bytes]:  # noqa: D102
        return {**super().files(), MEDIA_FILE: self.processor.settings.encode()}

    def parse(self, row: Mapping[str, Any]) -> str:
        """Convert a row to the text of a document, and decode its images, audio and video once.

        Raises:
            ValueError: the row has an unknown format, the template rejects it or prints a different
                number of media tokens than there are items, or an item cannot be read.
        """
        conversation = read_conversation(row)
        messages, files = extract_media(conversation.messages, self.processor.folder)
        media = [self.processor.measure(file) for file in files]
        rendered = self.render(messages, conversation.tools, 0)
        item_counts = Counter(item.kind for item in media)
        for media_type, token in self.processor.tokens.items():
            if (printed := rendered.text.count(token)) != item_counts[media_type]:
                raise ValueError(
                    f"the chat template prints {token!r} {printed} times for "
                    f"{item_counts[media_type]} parts of type {media_type!r}; use the template of "
                    "the model"
                )
        return document_json(_MediaDocument([rendered], conversation.weight, 0.0, tuple(media)))

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:  # noqa: D102
        return encode_media_rows(self.tokenizer, texts, tokens=self.media_tokens)

    def hold_out_key(self, text: str) -> str:  # noqa: D102
        return document_json(msgspec.structs.replace(_decode(text), weight=1.0))


def encode_media_rows(
    tokenizer: Tokenizer, texts: Sequence[str], *, tokens: Mapping[MediaKind, str]
) -> Sequence[Encoded]:
    """Encode rendered rows with images, audio and video.

    Args:
        tokenizer: tokenizer that has `tokens` as special tokens.
        texts: results of `MediaEncoder.parse`.
        tokens: placeholder token of each media type.

    Raises:
        TokenizerError: the number of media tokens in a text differs from the number of items.
    """
    rows = [_decode(text) for text in texts]
    encoded = tokenizer.encode_chats([row.parts[0] for row in rows])
    return [
        _expand_placeholders(tokenizer, Sample(ids, mask, row.weight), row.media, tokens)
        for row, (ids, mask) in zip(rows, encoded, strict=True)
    ]


def _expand_placeholders(
    tokenizer: Tokenizer,
    sample: Sample,
    media: Sequence[MediaItem],
    tokens: Mapping[MediaKind, str],
) -> Encoded:
    """Expand the placeholder of every image, audio clip and video to its number of tokens."""
    if not media:
        return Encoded(pack_media_sample(sample))
    repeats = np.ones(len(sample.tokens), np.int64)
    mask = sample.loss_mask.copy()
    positions: list[tuple[int, MediaItem]] = []
    for media_type, token in tokens.items():
        items = [item for item in media if item.kind == media_type]
        indices = np.flatnonzero(sample.tokens == tokenizer.special_token(token))
        if len(indices) != len(items):
            raise TokenizerError(
                f"encodes {len(indices)} tokens {token!r} in a text with {len(items)}; it must be "
                "a special token of the tokenizer; use the model's tokenizer"
            )
        repeats[indices] = [item.tokens for item in items]
        mask[indices] = False  # media tokens have no loss
        positions += zip(indices.tolist(), items, strict=True)
    starts = np.cumsum(repeats) - repeats  # (n,) new position of each token
    placed = [
        PlacedItem(item, int(starts[indices]))
        for indices, item in sorted(positions, key=_token_position)
    ]
    expanded = Sample(np.repeat(sample.tokens, repeats), np.repeat(mask, repeats), sample.weight)
    return Encoded(pack_media_sample(expanded), pack_media(placed))


def with_media(
    encoder: TextEncoder, processor: str | Path | Processor, corpus: CorpusName
) -> TextEncoder:
    """Extend a chat encoder to images, audio and video.

    Args:
        encoder: encoder of conversations.
        processor: the processor, or the folder with its settings.
        corpus: base of relative media paths, if it is a single local folder or file.

    Raises:
        SettingError: the encoder is for text or preference pairs, which have no media.
        TokenizerError: the processor cannot be read, or its tokens are not special tokens.
    """
    if not isinstance(encoder, ChatEncoder) or encoder.document_kind != "conversations":
        raise SettingError("processor needs conversations; set `chat`, without `pairs`")
    if not isinstance(processor, Processor):
        processor = Processor.load(processor)
    if processor.folder is None:
        processor = attrs.evolve(processor, folder=_corpus_folder(corpus))
    tokens = processor.tokens
    if "video" in tokens and tokens["video"] not in encoder.tokenizer.special_tokens:
        # A tokenizer for text and images alone.
        settings = msgspec.structs.replace(processor.settings, videos=None)
        processor = attrs.evolve(processor, settings=settings)
    for token in processor.tokens.values():
        encoder.tokenizer.special_token(token)
    return MediaEncoder(
        template=encoder.template,
        tokenizer=encoder.tokenizer,
        allow_special=encoder.allow_special,
        processor=processor,
    )


def _corpus_folder(corpus: CorpusName) -> Path | None:
    """Return the folder of a corpus that is a single local folder or file, else None."""
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


def _token_position(position: tuple[int, MediaItem]) -> int:
    return position[0]
