"""Encoders that convert the documents of a corpus to shard words: plain text and chat rows."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers
import xxhash
from attrs import evolve, frozen
from numpy.typing import NDArray

from ms_data.chat.messages import Message, read_conversation, reject_media
from ms_data.chat.pairs import read_pair, read_unpaired
from ms_data.chat.template import ChatTemplate, Rendered
from ms_data.disk.format import DocumentKind
from ms_data.disk.samples import (
    PairSample,
    Sample,
    UnpairedSample,
    pack_pair,
    pack_sample,
    pack_unpaired,
)
from ms_data.media.parts import MediaKind
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.word_encoder import WordEncoder


class ChatDocument(msgspec.Struct, frozen=True, array_like=True):
    """A rendered row; its JSON is passed through the build as a document's text."""

    parts: list[Rendered]
    weight: float
    margin: float = 0.0


class LabeledDocument(ChatDocument, frozen=True, array_like=True):
    """A rendered row with a label."""

    label: bool = True


class Encoded(NamedTuple):
    """A document as stored in a dataset."""

    words: NDArray[np.integer]
    """Words of the document in its shard, shape (n,)."""
    media: NDArray[np.uint32] | None = None
    """Words of its images and audio in the media shard, if it has any."""


class EncoderSetup(msgspec.Struct, frozen=True):
    """Settings that a worker process needs to encode identically."""

    tokenizer: bytes
    end_of_text: int
    document_kind: DocumentKind
    by_words: bool
    library_reason: str
    media_tokens: dict[MediaKind, str]
    """Placeholder token of each media type that rows may contain."""


@frozen(kw_only=True)
class TextEncoder:
    """Encodes text documents."""

    tokenizer: Tokenizer
    document_kind: DocumentKind = "text"
    words: WordEncoder | None = None
    """Fast encoder for documents; None uses the `tokenizers` library."""
    library_reason: str = "conversations need the offsets of their tokens"
    """Reason for using the library."""

    @property
    def batches_ahead(self) -> int:
        """Batches tokenized ahead of the one being written, so that no core idles on a long one."""
        cores = len(os.sched_getaffinity(0))
        return max(2, cores if self.words else cores // 4)  # the library is multithreaded itself

    @property
    def method(self) -> str:
        """Description of the encoder, for the summary."""
        if self.words is not None:
            return f"word by word, split like {self.words.split.name}"
        return f"tokenizers {tokenizers.__version__}, because {self.library_reason}"

    def with_library(self, why: str) -> "TextEncoder":
        """Return this encoder with the `tokenizers` library instead of the fast encoder."""
        return evolve(self, words=None, library_reason=why)

    @property
    def digest(self) -> str:
        """xxh3-128 of all settings apart from the tokenizer, hexadecimal; empty without any."""
        return ""

    @property
    def parser(self) -> Callable[[Mapping[str, Any]], str] | None:
        """Function that converts a row to a document's text; None if documents are not rows."""
        return None

    @property
    def media_tokens(self) -> dict[MediaKind, str]:
        """Placeholder token of each media type that documents may contain."""
        return {}

    def setup(self) -> bytes:
        """Serialize the settings that a worker needs to encode rendered documents identically."""
        return msgspec.msgpack.encode(
            EncoderSetup(
                tokenizer=self.tokenizer.content,
                end_of_text=self.tokenizer.end_of_text,
                document_kind=self.document_kind,
                by_words=self.words is not None,
                library_reason=self.library_reason,
                media_tokens=self.media_tokens,
            )
        )

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:
        """Encode documents as shard words."""
        if self.words is not None:
            encoded = self.tokenizer.encode_by_words(texts, self.words)
        else:
            encoded = self.tokenizer.encode_documents(texts)
        return [Encoded(words) for words in encoded]

    def hold_out_key(self, text: str) -> str:
        """Return the part of a document that decides whether it is held out."""
        return text

    def files(self) -> dict[str, bytes]:
        """Return the files to save next to the shards, by name, apart from the tokenizer."""
        return {}


@frozen(kw_only=True)
class ChatEncoder(TextEncoder):
    """Renders rows with the chat template and tokenizes the result."""

    template: ChatTemplate
    document_kind: DocumentKind = "conversations"
    allow_special: bool = False
    """Allow messages to contain special tokens."""

    @property
    def digest(self) -> str:  # noqa: D102 - documented in the base class, like the next ones
        settings = f"{self.template.digest} {self.document_kind} {self.allow_special}"
        return xxhash.xxh3_128_hexdigest(settings.encode())

    @property
    def parser(self) -> Callable[[Mapping[str, Any]], str]:  # noqa: D102
        return self.parse

    def files(self) -> dict[str, bytes]:  # noqa: D102
        return self.template.files()

    def parse(self, row: Mapping[str, Any]) -> str:
        """Convert a row to the text of a document.

        Raises:
            ValueError: the row has an unknown format, or the template rejects it.
        """
        if self.document_kind == "preferences":
            pair = read_pair(row)
            # Only the responses have loss, even if the prompt contains assistant turns.
            first = len(pair.prompt)
            reject_media([*pair.prompt, *pair.chosen, *pair.rejected])
            parts = [
                self.render([*pair.prompt, *answer], pair.tools, first)
                for answer in (pair.chosen, pair.rejected)
            ]
            return document_json(ChatDocument(parts, pair.weight, pair.margin))
        if self.document_kind == "unpaired":
            response = read_unpaired(row)
            reject_media([*response.prompt, *response.completion])
            messages = [*response.prompt, *response.completion]
            part = self.render(messages, response.tools, len(response.prompt))
            return document_json(LabeledDocument([part], response.weight, label=response.label))
        chat = read_conversation(row)
        reject_media(chat.messages)
        return document_json(ChatDocument([self.render(chat.messages, chat.tools, 0)], chat.weight))

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:  # noqa: D102
        return encode_rows(self.tokenizer, texts, kind=self.document_kind)

    def hold_out_key(self, text: str) -> str:
        """Return the document without weight, margin and label."""
        plain = msgspec.structs.replace(_decode(text), weight=1.0, margin=0.0)
        return document_json(plain)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, first: int
    ) -> Rendered:
        """Render a conversation; messages before `first` get no loss.

        Raises:
            ValueError: a message contains a special token, or the template rejects the messages.
        """
        if not self.allow_special:
            for index, message in enumerate(messages):
                self._refuse_special(message, f"message {index}")
            self._refuse_special(tools, "tools")
        return self.template.render_for_training(messages, tools=tools, first=first)

    def _refuse_special(self, value: object, location: str) -> None:
        texts = list(_iterate_strings(value))
        for token in self.tokenizer.special_tokens:
            if any(token in text for text in texts):
                raise ValueError(
                    f"{location} contains the special token {token!r}, which could end or forge a "
                    "message; remove it, or allow it with --allow-special"
                )


def encode_rows(
    tokenizer: Tokenizer, texts: Sequence[str], *, kind: DocumentKind
) -> Sequence[Encoded]:
    """Encode rendered rows as conversations, preference pairs or unpaired preferences."""
    document_type = LabeledDocument if kind == "unpaired" else ChatDocument
    rows: list[Any] = [msgspec.json.decode(text, type=document_type) for text in texts]
    parts = [part for row in rows for part in row.parts]
    # All parts of the batch are tokenized together; pairs have two parts per row.
    samples = iter([Sample(*encoded) for encoded in tokenizer.encode_chats(parts)])
    words = []
    for row in rows:
        if kind == "preferences":
            pair = PairSample(next(samples), next(samples), row.weight, row.margin)
            words.append(Encoded(pack_pair(pair)))
            continue
        sample = next(samples)._replace(weight=row.weight)
        if kind == "unpaired":
            words.append(Encoded(pack_unpaired(UnpairedSample(sample, row.label))))
        else:
            words.append(Encoded(pack_sample(sample)))
    return words


def _iterate_strings(value: object) -> Iterator[str]:
    """Yield the strings of a JSON value: values, keys, and the joined text parts of a list."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _iterate_strings(item)
    elif isinstance(value, list):
        yield "".join(part["text"] for part in value if isinstance(part, dict) and _is_text(part))
        for item in value:
            yield from _iterate_strings(item)


def document_json(document: ChatDocument) -> str:
    """Serialize a rendered row as the text of a document."""
    return msgspec.json.encode(document).decode()


def _decode(text: str) -> ChatDocument:
    return msgspec.json.decode(text, type=ChatDocument)


def _is_text(part: Mapping[str, object]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)
