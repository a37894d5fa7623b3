"""Rows of conversations with pictures and sound, as rules see them."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, frozen

from ms_data.chat.messages import read_conversation
from ms_data.cleaning.rule import Rule
from ms_data.cleaning.text import Text
from ms_data.errors import ConfigError
from ms_data.media.parts import MEDIA_TYPES, EncodedFile, MediaKind, take_media
from ms_data.settings import a_path


@frozen(kw_only=True)
class RowRule(Rule):
    """A rule that looks at the pictures or sounds of a row; its text is the row's JSON."""

    folder: str | None = field(default=None, validator=a_path(optional=True))
    """The folder that paths of pictures and sounds in rows are relative to."""

    def check(self) -> None:
        """Refuse `languages`, as a row has several texts.

        Raises:
            ConfigError: it is set.
        """
        if self.languages:
            raise ConfigError(f"{self.name} looks at all rows; leave out its languages")

    def files(self, row: Mapping[str, Any], kind: MediaKind) -> list[EncodedFile]:
        """Read the pictures, or the sounds, of a row.

        Raises:
            ValueError: one is not there, or lies elsewhere.
        """
        others = {one for one, found in MEDIA_TYPES.items() if found != kind}
        messages = [dict(message) for message in row["messages"]]
        for message in messages:
            if isinstance(message.get("content"), list):
                parts = [one for one in message["content"] if one["type"] not in others]
                message["content"] = parts
        return take_media(messages, Path(self.folder) if self.folder else None)[1]


def row_of(text: Text) -> dict[str, Any]:
    """The row that a document of JSON holds."""
    return msgspec.json.decode(text.text, type=dict[str, Any])


def row_json(row: Mapping[str, Any]) -> str:
    """Make the document of a row, whose bytes become `data:` addresses.

    Raises:
        ValueError: it is no row of `messages`.
    """
    if "messages" not in row:
        raise ValueError("a row without `messages`, which rules of pictures and sound look at")
    read_conversation(row)
    return msgspec.json.encode(_plain(row)).decode()


def _plain(value: Any) -> Any:
    """Write a picture's or sound's bytes as JSON can hold them."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return _plain(value["bytes"])
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    return value
