"""Takes pictures and sound out of messages: which files they name, or the bytes they carry.

| part | what holds the file |
|---|---|
| `{"type": "image", "image": ...}`, `{"type": "audio", "audio": ...}` | one of those below |
| `{"type": "image_url", "image_url": {"url": ...}}`, `audio_url` likewise | one of those below |

It is a path below the folder that was named for it, a `data:` address with base64, bytes, or the
`{"bytes": ..., "path": ...}` of a table of `datasets`. Nothing is fetched over a network.
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
"""No file of a picture or a sound is larger."""

CONVERSATION_BYTES = 128 << 20
"""All files of one conversation together are no larger."""

MediaKind = Literal["image", "audio"]

MEDIA_TYPES: dict[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "audio": "audio",
    "audio_url": "audio",
}
"""The types of parts that are no text, and what they hold."""

Message = dict[str, Any]
"""As `read_conversation` gives it."""


class EncodedFile(NamedTuple):
    """A picture or a sound as it was found."""

    kind: MediaKind
    content: bytes
    place: str
    """Where in the messages it stands."""


def take_media(
    messages: Sequence[Message], folder: Path | None
) -> tuple[list[Message], list[EncodedFile]]:
    """Split messages into what a template reads and the files of their pictures and sounds.

    Args:
        messages: as `read_conversation` gives them.
        folder: paths are relative to it; None refuses every path.

    Returns:
        The messages, in which each file has become a word, and the files in the order in which
        they stand there.

    Raises:
        ValueError: a file is not there, lies elsewhere or is too large; names the place.
    """
    files: list[EncodedFile] = []
    taken: list[Message] = []
    left = CONVERSATION_BYTES
    for at, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts: list[dict[str, Any]] = []
            for nth, part in enumerate(content):
                kind = MEDIA_TYPES.get(part["type"])
                if kind is None:
                    parts.append(part)
                    continue
                place = f"messages[{at}].content[{nth}]"
                found = _content(part, place, folder)
                left -= len(found)
                if left < 0:
                    raise ValueError(
                        f"{place}: its files are larger than {CONVERSATION_BYTES >> 20} MiB "
                        "together; cut the conversation"
                    )
                files.append(EncodedFile(kind, found, place))
                # Templates look for the type or for the key, and print neither's value.
                parts.append({"type": kind, kind: f"{kind} {len(files)}"})
            message = {**message, "content": parts}
        taken.append(message)
    return taken, files


def _content(part: Mapping[str, Any], place: str, folder: Path | None) -> bytes:
    """Find the bytes of a part."""
    value = part.get(part["type"])
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        content = value
    elif not isinstance(value, str) or not value:
        raise ValueError(f"{place} names no file; give a path, a data: address or bytes")
    elif value.startswith("data:"):
        content = _inline(value, place)
    elif "://" in value[:16]:
        raise ValueError(
            f"{place}: {printable(value)!r} lies elsewhere, and nothing is fetched; save the file "
            "below the folder of the corpus and give its path"
        )
    else:
        content = _read(value, place, folder)
    if not 0 < len(content) <= FILE_BYTES:
        raise ValueError(
            f"{place} has {len(content)} bytes; a file has 1 byte to {FILE_BYTES >> 20} MiB"
        )
    return content


def _inline(address: str, place: str) -> bytes:
    head, comma, body = address.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"{place} is no `data:...;base64,` address; write it as one")
    if len(body) > FILE_BYTES * 4 // 3 + 4:
        raise ValueError(f"{place} is larger than {FILE_BYTES >> 20} MiB; make the file smaller")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{place} is no base64: {error}; write it again") from error


def _read(name: str, place: str, folder: Path | None) -> bytes:
    """Read a file below `folder`, through no link, so that a row cannot name any other."""
    where = f"{place}: {printable(name)!r}"
    if folder is None:
        raise ValueError(f"{where}: no folder is known that it lies in; name it (--media-folder)")
    parts = name.split("/")
    if "\0" in name or any(one in ("", ".", "..") for one in parts):
        raise ValueError(f"{where} leaves the folder of the corpus; give a path below it")
    try:
        holder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for one in parts[:-1]:
                inner = os.open(one, _INSIDE | os.O_DIRECTORY, dir_fd=holder)
                os.close(holder)
                holder = inner
            descriptor = os.open(parts[-1], _INSIDE | os.O_NONBLOCK, dir_fd=holder)
        finally:
            os.close(holder)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no path"
        raise ValueError(
            f"{where} below {printable(folder)}: cannot be read, or is a link: {reason}"
        ) from error
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > FILE_BYTES:
            raise ValueError(f"{where} is no file of at most {FILE_BYTES >> 20} MiB")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


_INSIDE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
