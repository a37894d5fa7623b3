"""Turns the documents of a corpus into the words that a shard holds: text, or rows of messages."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers
import xxhash
from attrs import evolve, frozen
from numpy.typing import NDArray

from ms_data.chat.messages import Message, read_conversation, refuse_media
from ms_data.chat.pairs import read_pair
from ms_data.chat.template import ChatTemplate, Rendered
from ms_data.disk.format import Kind
from ms_data.disk.samples import PairSample, Sample, pack_pair, pack_sample
from ms_data.media.parts import MediaKind
from ms_data.tokenization.tokenizer import Tokenizer
from ms_data.tokenization.word_encoder import WordEncoder


class ChatDocument(msgspec.Struct, frozen=True, array_like=True):
    """A row once its template has run; its JSON is the text of a document of the build."""

    parts: list[Rendered]
    weight: float
    margin: float = 0.0


class Encoded(NamedTuple):
    """A document as a dataset holds it."""

    words: NDArray[np.integer]
    """What its shard holds, shape (n,)."""
    media: NDArray[np.uint32] | None = None
    """What the shard of its pictures and sounds holds, if it has any."""


class EncoderSetup(msgspec.Struct, frozen=True):
    """What a process of a cluster needs to encode as this one does."""

    tokenizer: bytes
    end_of_text: int
    kind: Kind
    by_words: bool
    why_library: str
    media_tokens: dict[MediaKind, str]
    """The token of each kind of media, where the rows may have some."""


@frozen(kw_only=True)
class TextEncoder:
    """Turns documents of text into the words that a shard holds."""

    tokenizer: Tokenizer
    kind: Kind = "text"
    words: WordEncoder | None = None
    """A faster encoder of documents; None leaves them to the `tokenizers` library."""
    why_library: str = "conversations keep the places of their tokens"
    """Why the library encodes, where it does."""

    @property
    def batches_ahead(self) -> int:
        """Batches that are tokenized while one is written, so that no core waits for a document."""
        cores = len(os.sched_getaffinity(0))
        return max(2, cores if self.words else cores // 4)  # the library uses all cores for each

    @property
    def method(self) -> str:
        """What encodes the documents, in words for a summary."""
        if self.words is not None:
            return f"word by word, cut as by {self.words.split.name}"
        return f"tokenizers {tokenizers.__version__}, as {self.why_library}"

    def by_library(self, why: str) -> "TextEncoder":
        """Return the same encoder, but with the `tokenizers` library in place of the faster one."""
        return evolve(self, words=None, why_library=why)

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of all settings but the tokenizer's; empty where there are none."""
        return ""

    @property
    def parser(self) -> Callable[[Mapping[str, Any]], str] | None:
        """The function that makes a document's text from a row; None if documents are not rows."""
        return None

    @property
    def media_tokens(self) -> dict[MediaKind, str]:
        """The token of each kind of media that documents may have."""
        return {}

    def setup(self) -> bytes:
        """Encode what another process needs to tokenize alike, once templates have run."""
        return msgspec.msgpack.encode(
            EncoderSetup(
                tokenizer=self.tokenizer.content,
                end_of_text=self.tokenizer.end_of_text,
                kind=self.kind,
                by_words=self.words is not None,
                why_library=self.why_library,
                media_tokens=self.media_tokens,
            )
        )

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:
        """Turn each document into its words, as a shard holds them."""
        if self.words is not None:
            found = self.tokenizer.encode_by_words(texts, self.words)
        else:
            found = self.tokenizer.encode_documents(texts)
        return [Encoded(words) for words in found]

    def hold_out_key(self, text: str) -> str:
        """Return the part of a document that decides whether it is held out."""
        return text

    def files(self) -> dict[str, bytes]:
        """Return files to keep beside the shards, by name, apart from the tokenizer."""
        return {}


@frozen(kw_only=True)
class ChatEncoder(TextEncoder):
    """Turns rows into text with the template, and text into words with the tokenizer."""

    template: ChatTemplate
    kind: Kind = "conversations"
    allow_special: bool = False
    """Let messages spell special tokens, which then are these tokens."""

    @property
    def digest(self) -> str:  # noqa: D102 - as in the base class, like all that follows
        settings = f"{self.template.digest} {self.kind} {self.allow_special}"
        return xxhash.xxh3_128_hexdigest(settings.encode())

    @property
    def parser(self) -> Callable[[Mapping[str, Any]], str]:  # noqa: D102
        return self.parse

    def files(self) -> dict[str, bytes]:  # noqa: D102
        return self.template.files()

    def parse(self, row: Mapping[str, Any]) -> str:
        """Make the text of a document from one row.

        Raises:
            ValueError: the row is of no known form, or the template refuses it.
        """
        if self.kind == "preferences":
            pair = read_pair(row)
            first = len(pair.prompt)
            refuse_media([*pair.prompt, *pair.chosen, *pair.rejected])
            parts = [
                self.render([*pair.prompt, *answer], pair.tools, first)
                for answer in (pair.chosen, pair.rejected)
            ]
            return as_json(ChatDocument(parts, pair.weight, pair.margin))
        one = read_conversation(row)
        refuse_media(one.messages)
        return as_json(ChatDocument([self.render(one.messages, one.tools, 0)], one.weight))

    def encode(self, texts: Sequence[str]) -> Sequence[Encoded]:  # noqa: D102
        return encode_rows(self.tokenizer, texts, pairs=self.kind == "preferences")

    def hold_out_key(self, text: str) -> str:
        """Return the document without the row's weight and margin."""
        plain = msgspec.structs.replace(_decode(text), weight=1.0, margin=0.0)
        return as_json(plain)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, first: int
    ) -> Rendered:
        """Render a conversation, of which messages before `first` are not trained on.

        Raises:
            ValueError: a message spells a special token, or the template refuses them.
        """
        if not self.allow_special:
            for at, message in enumerate(messages):
                self._refuse_special(message, f"message {at}")
            self._refuse_special(tools, "tools")
        return self.template.render_for_training(messages, tools=tools, first=first)

    def _refuse_special(self, value: object, place: str) -> None:
        texts = list(_texts(value))
        for token in self.tokenizer.special_tokens:
            if any(token in text for text in texts):
                raise ValueError(
                    f"{place} spells the special token {token!r}, which could end or forge a "
                    "message; remove it, or let it be with --allow-special"
                )


def encode_rows(tokenizer: Tokenizer, texts: Sequence[str], *, pairs: bool) -> Sequence[Encoded]:
    """Turn rows whose template has run into the words of conversations, or of preference pairs."""
    rows = [_decode(text) for text in texts]
    parts = [part for row in rows for part in row.parts]
    samples = iter([Sample(*found) for found in tokenizer.encode_chats(parts)])
    words = []
    for row in rows:
        if pairs:
            pair = PairSample(next(samples), next(samples), row.weight, row.margin)
            words.append(Encoded(pack_pair(pair)))
        else:
            sample = next(samples)._replace(weight=row.weight)
            words.append(Encoded(pack_sample(sample)))
    return words


def _texts(value: object) -> Iterator[str]:
    """Find every text in a JSON value, keys included; parts of a content also joined."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        yield "".join(part["text"] for part in value if isinstance(part, dict) and _is_text(part))
        for one in value:
            yield from _texts(one)


def as_json(document: ChatDocument) -> str:
    """Encode a row whose template has run as the text of a document of the build."""
    return msgspec.json.encode(document).decode()


def _decode(text: str) -> ChatDocument:
    return msgspec.json.decode(text, type=ChatDocument)


def _is_text(part: Mapping[str, object]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)
