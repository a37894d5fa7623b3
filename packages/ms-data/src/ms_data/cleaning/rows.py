"""Rows of conversations with images and audio, for rules."""

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
from ms_data.media.parts import MEDIA_TYPES, EncodedFile, MediaKind, extract_media
from ms_data.settings import valid_path


@frozen(kw_only=True)
class RowRule(Rule):
    """A rule for the images or audio of a row; its text is the row's JSON."""

    folder: str | None = field(default=None, validator=valid_path(optional=True))
    """Base folder of image and audio paths in rows."""

    def check(self) -> None:
        """Reject `languages`, because a row has several texts.

        Raises:
            ConfigError: `languages` is set.
        """
        if self.languages:
            raise ConfigError(f"{self.name} applies to all rows; remove its languages")

    def files(self, row: Mapping[str, Any], media_kind: MediaKind) -> list[EncodedFile]:
        """Read the image or audio files of a row.

        Raises:
            ValueError: a file is missing, or outside the base folder.
        """
        # Files of the other kind are not read: their own rule reports them.
        other_types = {name for name, media in MEDIA_TYPES.items() if media != media_kind}
        messages = [dict(message) for message in row["messages"]]
        for message in messages:
            if isinstance(message.get("content"), list):
                parts = [part for part in message["content"] if part["type"] not in other_types]
                message["content"] = parts
        return extract_media(messages, Path(self.folder) if self.folder else None)[1]


def decode_row(text: Text) -> dict[str, Any]:
    """Decode the row of a document."""
    return msgspec.json.decode(text.text, type=dict[str, Any])


def row_json(row: Mapping[str, Any]) -> str:
    """Encode a row as a document; bytes become `data:` URLs.

    Raises:
        ValueError: the row has no valid `messages`.
    """
    if "messages" not in row:
        raise ValueError("a row without `messages`, which image and audio rules need")
    read_conversation(row)
    return msgspec.json.encode(_json_ready(row)).decode()


def _json_ready(value: Any) -> Any:
    """Convert bytes to `data:` URLs, so that JSON can hold them."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return _json_ready(value["bytes"])
        return {name: _json_ready(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_ready(item) for item in value]
    if isinstance(value, bytes):
        return f"data:application/octet-stream;base64,{base64.b64encode(value).decode()}"
    return value
