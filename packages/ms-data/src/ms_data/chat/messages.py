"""Reads rows of instruction datasets in the published formats.

 format | keys |
---|---|
 OpenAI | `messages`: role, content, optional tool calls and `weight`; `tools` |
 ShareGPT | `conversations`: from, value, optional `weight`; `system`, `tools` |
 Alpaca | `instruction`, `input`, `output`; `system`, `history` |

Content is text or a list of parts of type `text`, `image`, `audio` or `video` (also `image_url`,
`audio_url` and `video_url`). Rows may have other keys, such as an ID or a source. A row that
matches two formats or none, or a message with a key, role or type unknown to its format, is
rejected with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ms_data.arguments import check_type
from ms_data.media.parts import MEDIA_TYPES, NOUNS

Message = dict[str, Any]
"""`role`, `content` and the other keys of the role, as chat templates read them."""

_ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")}
_KEYS = {
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "thinking",
    "weight",
}
_PART = "put each into a message's content as a part such as {'type': 'image', 'image': PATH}"
_UNSUPPORTED_KEYS = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _PART),
    "functions": "use `tools`, as in OpenAI's current format",
}
_SHAREGPT_KEYS = {"from", "value", "weight"}
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation; the messages of the role `assistant` are trained on."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0
    """Loss weight of the sample, at least 0."""


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Read the conversation in a row of an instruction dataset.

    Raises:
        ValueError: the row matches no format, or more than one, or is invalid; names the location.
    """
    check_type("row", row, Mapping, "a mapping", error=ValueError)
    matching = [key for key in _READERS if key in row]
    if len(matching) != 1:
        keys = ", ".join(map(repr, row)) or "none"
        which = f"{len(matching)} formats ({', '.join(matching)})" if matching else "no format"
        raise ValueError(
            f"the row matches {which}, its keys are {keys}; use `messages` (OpenAI), "
            "`conversations` (ShareGPT) or `instruction` and `output` (Alpaca)"
        )
    check_other_keys(row)
    messages = _READERS[matching[0]](row)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no assistant message, so there is nothing to train on")
    return Conversation(messages=messages, tools=read_tools(row), weight=read_number(row, "weight"))


def check_other_keys(row: Mapping[str, Any]) -> None:
    """Reject keys whose content would be ignored.

    Raises:
        ValueError: the row has images, audio, video or tools in an unsupported key.
    """
    for key in _UNSUPPORTED_KEYS:
        if row.get(key):
            raise ValueError(
                f"the row has `{key}`, which is not supported; {_UNSUPPORTED_KEYS[key]}"
            )


def read_messages(value: object, name: str) -> list[Message]:
    """Read a list of OpenAI messages; `name` is its location in the row."""
    return [
        _message(item, location)
        for location, item in _iterate_objects(value, name, "messages", _KEYS)
    ]


def read_sharegpt(value: object, name: str) -> list[Message]:
    """Read a list of ShareGPT turns as messages."""
    return [
        _sharegpt_message(item, location)
        for location, item in _iterate_objects(value, name, "turns", _SHAREGPT_KEYS)
    ]


def alpaca_messages(row: Mapping[str, Any]) -> list[Message]:
    """Read system message, history and instruction of an Alpaca row; `input` is appended."""
    messages = read_system(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history must be a list of pairs, got {_shorten(history)}")
    for index, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history[{index}] must be [question, answer], got {_shorten(pair)}")
        messages.append({"role": "user", "content": _text(pair[0], f"history[{index}][0]")})
        messages.append({"role": "assistant", "content": _text(pair[1], f"history[{index}][1]")})
    instruction = _text(row["instruction"], "instruction")
    input_text = _text(row.get("input") or "", "input")
    text = f"{instruction}\n\n{input_text}" if input_text else instruction
    if not text.strip():
        raise ValueError("instruction is empty")
    return [*messages, {"role": "user", "content": text}]


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read the `tools` of a row: a list of JSON schemas, or its JSON text; None if empty."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = msgspec.json.decode(tools)  # ShareGPT datasets store the schemas as JSON text
        except msgspec.DecodeError as error:
            raise ValueError(f"tools is a string but not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas, got {_shorten(tools)}")
    return tools


def reject_media(messages: Sequence[Message]) -> None:
    """Reject images, audio and video in text-only datasets.

    Raises:
        ValueError: a message contains an image, audio or a video.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part["type"] in MEDIA_TYPES:
                raise ValueError(
                    f"messages[{index}] contains {NOUNS[MEDIA_TYPES[part['type']]]}; pass the "
                    "model's processor (--processor), or remove it"
                )


def read_number(row: Mapping[str, Any], name: str, default: float = 1.0) -> float:
    """Read an optional number of a row, which must be at least 0."""
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError(f"{name} must be a number of 0 or more, got {_shorten(value)}")
    return float(value)


def read_system(row: Mapping[str, Any]) -> list[Message]:
    """Read the `system` key of a row as a list of one message; empty without it."""
    if not row.get("system"):
        return []
    return [{"role": "system", "content": _text(row["system"], "system")}]


def _openai(row: Mapping[str, Any]) -> list[Message]:
    messages = read_messages(row["messages"], "messages")
    system = read_system(row)
    # Some datasets repeat the system message in both places.
    if system and messages[0]["role"] == "system":
        if messages[:1] != system:
            raise ValueError("`system` is not the first message of `messages`; remove either")
        return messages
    return [*system, *messages]


def _sharegpt(row: Mapping[str, Any]) -> list[Message]:
    return [*read_system(row), *read_sharegpt(row["conversations"], "conversations")]


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    if "output" not in row:
        raise ValueError("`instruction` without `output`; an Alpaca row needs both")
    answer = {"role": "assistant", "content": _text(row["output"], "output")}
    return [*alpaca_messages(row), _check_message(answer, "output")]


_READERS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _openai,
    "conversations": _sharegpt,
    "instruction": _alpaca,
}


def _iterate_objects(
    value: object, name: str, noun: str, keys: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a list with their locations, after checking their keys."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of {noun}, got {_shorten(value)}")
    for index, item in enumerate(value):
        location = f"{name}[{index}]"
        if not isinstance(item, dict):
            raise ValueError(f"{location} must be an object, got {_shorten(item)}")
        if unknown := sorted(set(item) - keys):
            raise ValueError(
                f"{location} has an unknown key {unknown[0]!r}; allowed keys are {sorted(keys)}"
            )
        yield location, item


def _role(value: object, roles: Mapping[str, str], location: str) -> str:
    if not isinstance(value, str) or value not in roles:
        raise ValueError(f"{location} must be one of {', '.join(roles)}, got {_shorten(value)}")
    return roles[value]


def _message(value: dict[str, Any], location: str) -> Message:
    if "role" not in value:
        raise ValueError(f"{location} must have a `role` and a `content`, got {_shorten(value)}")
    _role(value["role"], _ROLES, f"{location}.role")
    # Tables fill the keys that a row lacks with null.
    message = {key: item for key, item in value.items() if item is not None}
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            part_type = part.get("type") if isinstance(part, dict) else None
            if part_type == "text":
                _text(part.get("text"), f"{location}.content[{index}].text")
            elif not isinstance(part_type, str) or part_type not in MEDIA_TYPES:
                raise ValueError(
                    f"{location}.content[{index}] is not text, an image, audio or a video; other "
                    "types are not supported"
                )
    elif content is not None:
        _text(content, f"{location}.content")
    return _check_message(message, location)


def _sharegpt_message(value: dict[str, Any], location: str) -> Message:
    if not {"from", "value"} <= set(value):
        raise ValueError(f"{location} must have `from` and `value`, got {_shorten(value)}")
    role = _role(value["from"], _SHAREGPT_ROLES, f"{location}.from")
    text = _text(value["value"], f"{location}.value")
    message: Message = {"role": role, "content": text}
    if value["from"] == "function_call":  # ShareGPT stores a tool call as JSON text
        message |= {"content": "", "tool_calls": _calls(text, location)}
    if value.get("weight") is not None:
        message["weight"] = value["weight"]
    return _check_message(message, location)


def _check_message(message: Message, location: str) -> Message:
    """Return the message after checking that it is not empty and that its weight is 0 or 1."""
    if message.get("weight", 0) not in (0, 1):
        raise ValueError(f"{location}.weight must be 0 or 1, got {_shorten(message['weight'])}")
    # System messages and tool results may be empty strings, but need a content.
    filled = message.get("content") or message.get("tool_calls")
    if message["role"] in ("assistant", "user") and not filled:
        raise ValueError(f"{location} is an empty {message['role']} message; add content")
    if not filled and not isinstance(message.get("content"), str):
        raise ValueError(
            f"{location} is a {message['role']} message without content; add a string, which may "
            "be empty"
        )
    return message


def _calls(text: str, location: str) -> list[dict[str, Any]]:
    try:
        call = msgspec.json.decode(text, type=dict[str, Any])
        function = {"name": call["name"], "arguments": call["arguments"]}
    except (msgspec.DecodeError, KeyError) as error:
        raise ValueError(
            f"{location}.value must be JSON with `name` and `arguments`, got {_shorten(text)}"
        ) from error
    return [{"type": "function", "function": function}]


def _text(value: object, location: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{location} must be a string, got {_shorten(value)}")
    return value


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
