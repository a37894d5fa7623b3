"""From rows of an instruction or preference set to the documents that a build writes."""

from collections.abc import Iterator, Mapping, Sequence
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
from ms_data.tokenization.tokenizer import Tokenizer

__all__ = ["ChatEncoder"]


class _Text(msgspec.Struct, frozen=True, array_like=True):
    """What is left of a row once its template has run; the text of the build's document."""

    parts: list[tuple[str, list[tuple[int, int]]]]
    weight: float
    margin: float = 0.0


@frozen(kw_only=True)
class ChatEncoder:
    """Turns rows into text with the template, and text into tokens with the tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer
    kind: Kind = "conversations"
    allow_special: bool = False
    """Let messages spell special tokens, which then are these tokens."""

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of all settings but the tokenizer's."""
        told = f"{self.template.digest} {self.kind} {self.allow_special}"
        return xxhash.xxh3_128_hexdigest(told.encode())

    def parse(self, line: bytes) -> str:
        """The document of one JSON line.

        Raises:
            ValueError: the line is no JSON object of a known form, or the template refuses it.
        """
        row = msgspec.json.decode(line)
        if not isinstance(row, dict):
            raise ValueError(f"a row must be a JSON object, not {type(row).__name__}")
        if self.kind == "preferences":
            pair = read_pair(row)
            first = len(pair.prompt)
            parts = [
                self._render([*pair.prompt, *answer], pair.tools, first)
                for answer in (pair.chosen, pair.rejected)
            ]
            return self._told(parts, pair.weight, pair.margin)
        one = read_conversation(row)
        return self._told([self._render(one.messages, one.tools, 0)], one.weight, 0.0)

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The words of each document that `parse` gave, as a shard holds them."""
        rows = [msgspec.json.decode(text, type=_Text) for text in texts]
        parts = [Rendered(text, tuple(spans)) for row in rows for text, spans in row.parts]
        samples = iter([Sample(*found) for found in self.tokenizer.encode_chats(parts)])
        words = []
        for row in rows:
            if self.kind == "preferences":
                pair = PairSample(next(samples), next(samples), row.weight, row.margin)
                words.append(pack_pair(pair))
            else:
                words.append(pack_sample(next(samples)._replace(weight=row.weight)))
        return words

    @staticmethod
    def words(text: str) -> str:
        """A document that `parse` gave, as if its row had neither weight nor margin."""
        row = msgspec.json.decode(text, type=_Text)
        plain = msgspec.structs.replace(row, weight=1.0, margin=0.0)
        return msgspec.json.encode(plain).decode()

    def _told(self, parts: list[Rendered], weight: float, margin: float) -> str:
        plain = [(one.text, list(one.spans)) for one in parts]
        return msgspec.json.encode(_Text(plain, weight, margin)).decode()

    def _render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, first: int
    ) -> Rendered:
        if not self.allow_special:
            for at, message in enumerate(messages):
                self._refuse_special(message, f"message {at}")
            self._refuse_special(tools, "tools")
        return self.template.learnt(messages, tools=tools, first=first)

    def _refuse_special(self, value: object, place: str) -> None:
        texts = list(_texts(value))
        for token in self.tokenizer.special_tokens:
            if any(token in text for text in texts):
                raise ValueError(
                    f"{place} spells the special token {token!r}, which could end or forge a "
                    "message; remove it, or let it be with --allow-special"
                )


def _texts(value: object) -> Iterator[str]:
    """Every text in a JSON value, keys included; parts of a content also as they are joined."""
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


def _is_text(part: Mapping[str, object]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)
