"""Turns the documents of a corpus into the words that a shard holds: text, or rows of messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray

from ms_data.chat.messages import Message, read_conversation
from ms_data.chat.pairs import read_pair
from ms_data.chat.template import ChatTemplate, Rendered
from ms_data.disk.format import Kind
from ms_data.disk.samples import PairSample, Sample, pack_pair, pack_sample
from ms_data.errors import SettingError
from ms_data.tokenization.tokenizer import Tokenizer


class _Document(msgspec.Struct, frozen=True, array_like=True):
    """A row once its template has run; its JSON is the text of a document of the build."""

    parts: list[Rendered]
    weight: float
    margin: float = 0.0


@frozen(kw_only=True)
class TextEncoder:
    """Turns documents of text into the words that a shard holds."""

    tokenizer: Tokenizer
    kind: Kind = "text"

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of all settings but the tokenizer's; empty where there are none."""
        return ""

    @property
    def parser(self) -> Callable[[Mapping[str, Any]], str] | None:
        """Makes the text of a document from a row; None where documents are not rows."""
        return None

    def encode(self, texts: Sequence[str]) -> Sequence[NDArray[np.integer]]:
        """Turns each document into its words, as a shard holds them."""
        return self.tokenizer.encode_documents(texts)

    def hold_out_key(self, text: str) -> str:
        """The part of a document that decides whether it is held out."""
        return text

    def files(self) -> dict[str, bytes]:
        """Files to keep beside the shards, by name, apart from the tokenizer."""
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
        """Makes the text of a document from one row.

        Raises:
            ValueError: the row is of no known form, or the template refuses it.
        """
        if self.kind == "preferences":
            pair = read_pair(row)
            first = len(pair.prompt)
            parts = [
                self._render([*pair.prompt, *answer], pair.tools, first)
                for answer in (pair.chosen, pair.rejected)
            ]
            return _encode(_Document(parts, pair.weight, pair.margin))
        one = read_conversation(row)
        return _encode(_Document([self._render(one.messages, one.tools, 0)], one.weight))

    def encode(self, texts: Sequence[str]) -> Sequence[NDArray[np.integer]]:  # noqa: D102
        rows = [_decode(text) for text in texts]
        parts = [part for row in rows for part in row.parts]
        samples = iter([Sample(*found) for found in self.tokenizer.encode_chats(parts)])
        words = []
        for row in rows:
            if self.kind == "preferences":
                pair = PairSample(next(samples), next(samples), row.weight, row.margin)
                words.append(pack_pair(pair))
            else:
                words.append(pack_sample(next(samples)._replace(weight=row.weight)))
        return words

    def hold_out_key(self, text: str) -> str:
        """The document without the row's weight and margin."""
        plain = msgspec.structs.replace(_decode(text), weight=1.0, margin=0.0)
        return _encode(plain)

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, first: int
    ) -> Rendered:
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


def encoder_for(
    tokenizer: str | Path | Tokenizer,
    chat: str | Path | ChatTemplate | None,
    *,
    pairs: bool,
    allow_special: bool,
) -> TextEncoder:
    """Chooses the encoder of a build by its arguments.

    Raises:
        SettingError: arguments that need a chat template without one, or a template whose text
            differs from day to day.
        TokenizerError: the tokenizer or the template cannot be read.
    """
    model = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    if chat is None:
        if pairs or allow_special:
            raise SettingError("pairs and allow_special need a chat template; give `chat`")
        return TextEncoder(tokenizer=model)
    template = chat if isinstance(chat, ChatTemplate) else ChatTemplate.load(chat)
    if template.asks_date and template.today is None:
        raise SettingError(
            "the chat template prints today's date, so a build would differ from day to day; "
            "choose the date with --today"
        )
    return ChatEncoder(
        template=template.with_tokens_of(model.folder),
        tokenizer=model,
        kind="preferences" if pairs else "conversations",
        allow_special=allow_special,
    )


def _texts(value: object) -> Iterator[str]:
    """Finds every text in a JSON value, keys included; parts of a content also joined."""
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


def _encode(document: _Document) -> str:
    return msgspec.json.encode(document).decode()


def _decode(text: str) -> _Document:
    return msgspec.json.decode(text, type=_Document)


def _is_text(part: Mapping[str, object]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)
