"""Extracts images, audio and video from messages: files that they name, or bytes in them.

 part | source |
---|---|
 `{"type": "image", "image": ...}`, also `audio` and `video` | see below |
 `{"type": "image", "path": ...}`, also `url` | see below |
 `{"type": "image_url", "image_url": {"url": ...}}`, also `audio_url` and `video_url` | see below |

A source is a path below the media folder, a base64 `data:` URL, bytes, or the `{"bytes": ...,
"path": ...}` of a `datasets` table. Nothing is downloaded.
"""

import base64
import binascii
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ms_data.errors import printable

FILE_BYTES = 32 << 20
"""Maximum size of an image, audio or video file."""

CONVERSATION_BYTES = 128 << 20
"""Maximum total size of the files of one conversation."""

MediaKind = Literal["image", "audio", "video"]

NOUNS: dict[MediaKind, str] = {"image": "an image", "audio": "audio", "video": "a video"}
"""Media kinds in messages."""

MEDIA_TYPES: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
}
"""Media kind by the type of a content part."""

Message = dict[str, Any]
"""A message, as returned by `read_conversation`."""


class EncodedFile(NamedTuple):
    """An encoded image, audio or video file."""

    kind: MediaKind
    content: bytes
    location: str
    """Location in the messages."""


def extract_media(
    messages: Sequence[Message], folder: Path | None
) -> tuple[list[Message], list[EncodedFile]]:
    """Split messages into a version for the chat template and the media files.

    Args:
        messages: messages as returned by `read_conversation`.
        folder: base folder of paths; None rejects all paths.

    Returns:
        The messages, with every file replaced by a short string, and the files in order.

    Raises:
        ValueError: a file is missing, outside the folder or too large; names the location.
    """
    files: list[EncodedFile] = []
    text_messages: list[Message] = []
    remaining_bytes = CONVERSATION_BYTES
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts: list[dict[str, Any]] = []
            for part_index, part in enumerate(content):
                media_kind = MEDIA_TYPES.get(part["type"])
                if media_kind is None:
                    parts.append(part)
                    continue
                location = f"messages[{index}].content[{part_index}]"
                data = _content(part, location, folder)
                remaining_bytes -= len(data)
                if remaining_bytes < 0:
                    raise ValueError(
                        f"{location}: the files of the conversation exceed "
                        f"{CONVERSATION_BYTES >> 20} MiB in total; shorten the conversation"
                    )
                files.append(EncodedFile(media_kind, data, location))
                # Templates test for the type or the key, and print neither value.
                parts.append({"type": media_kind, media_kind: f"{media_kind} {len(files)}"})
            message = {**message, "content": parts}
        text_messages.append(message)
    return text_messages, files


def _content(part: Mapping[str, Any], location: str, folder: Path | None) -> bytes:
    """Return the bytes of a part."""
    # transformers' chat format names the source by its kind instead of the part's type.
    keys = (part["type"], "path", "url")
    value = next((part[key] for key in keys if part.get(key) is not None), None)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        content = value
    elif not isinstance(value, str) or not value:
        raise ValueError(f"{location} names no file; use a path, a data: URL or bytes")
    elif value.startswith("data:"):
        content = _decode_data_url(value, location)
    elif "://" in value[:16]:
        raise ValueError(
            f"{location}: {printable(value)!r} is a URL, and nothing is downloaded; save the file "
            "below the corpus folder and use its path"
        )
    else:
        content = _read(value, location, folder)
    if not 0 < len(content) <= FILE_BYTES:
        raise ValueError(
            f"{location} must have 1 byte to {FILE_BYTES >> 20} MiB, got {len(content)} bytes"
        )
    return content


def _decode_data_url(url: str, location: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(
            f"{location} must be a `data:...;base64,` URL; encode the file with base64"
        )
    if len(body) > FILE_BYTES * 4 // 3 + 4:  # base64 has 4 characters for 3 bytes
        raise ValueError(f"{location} is larger than {FILE_BYTES >> 20} MiB; make the file smaller")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{location} is not valid base64: {error}; encode it again") from error


def _read(name: str, location: str, folder: Path | None) -> bytes:
    """Read a file below `folder` without following links, so that a row cannot name other files."""
    label = f"{location}: {printable(name)!r}"
    if folder is None:
        raise ValueError(f"{label}: there is no media folder; set one with --media-folder")
    parts = name.split("/")
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{label} is outside the media folder; use a path below it")
    try:
        parent_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Open every level relative to its parent: no component can be a link.
            for part in parts[:-1]:
                child_fd = os.open(part, _OPEN_FLAGS | os.O_DIRECTORY, dir_fd=parent_fd)
                os.close(parent_fd)
                parent_fd = child_fd
            # O_NONBLOCK: opening a pipe would wait for a writer.
            descriptor = os.open(parts[-1], _OPEN_FLAGS | os.O_NONBLOCK, dir_fd=parent_fd)
        finally:
            os.close(parent_fd)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ValueError(
            f"{label} below {printable(folder)}: cannot be read, or is a link: {reason}"
        ) from error
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_size > FILE_BYTES:
            raise ValueError(f"{label} must be a file of at most {FILE_BYTES >> 20} MiB")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{label}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


_OPEN_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
