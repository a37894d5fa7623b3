"""Reads the rows of instruction sets, in the forms in which they are published.

| form | keys |
|---|---|
| OpenAI | `messages`: role and content, tool calls and `weight` included; `tools` |
| ShareGPT | `conversations`: from and value, `weight` included; `system`, `tools` |
| Alpaca | `instruction`, `input`, `output`; `system`, `history` |

A content is text, or parts: `text`, `image` and `audio` (`image_url` and `audio_url` likewise).
A row may carry further keys of its own (an id, a source); one that fits two forms or none, or a
message with a key, role or type that its form doesn't have, is refused with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ms_data.media.parts import MEDIA_TYPES

Message = dict[str, Any]
"""`role`, `content`, and what the role allows, as a chat template reads it."""

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
_PART = "make each a part of a message's content, as {'type': 'image', 'image': PATH}"
_LOST_KEYS = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _PART),
    "functions": "give `tools`, as OpenAI's newer form has them",
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
    """Messages, of which those of the role `assistant` are trained on."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0
    """How much this sample's loss counts, 0 or more."""


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """Read the conversation in one row of an instruction set.

    Raises:
        ValueError: the row fits none of the forms, or more than one; names the place in it.
    """
    found = [form for form in _FORMS if form in row]
    if len(found) != 1:
        keys = ", ".join(map(repr, row)) or "none"
        what = "fits no form" if not found else f"fits {len(found)} forms ({', '.join(found)})"
        raise ValueError(
            f"{what}, its keys being {keys}; give `messages` (OpenAI), `conversations` "
            "(ShareGPT) or `instruction` and `output` (Alpaca)"
        )
    check_other_keys(row)
    messages = _FORMS[found[0]](row)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message of the assistant, so there is nothing to learn")
    return Conversation(messages=messages, tools=read_tools(row), weight=read_number(row, "weight"))


def check_other_keys(row: Mapping[str, Any]) -> None:
    """Refuse keys of a row whose content would be left out.

    Raises:
        ValueError: the row has pictures, sounds or tools in a key that is not read.
    """
    for key in _LOST_KEYS:
        if row.get(key):
            raise ValueError(f"the row has `{key}`, which is not read; {_LOST_KEYS[key]}")


def read_messages(value: object, name: str) -> list[Message]:
    """Read a list of OpenAI messages; `name` says where they stand."""
    return [_message(one, place) for place, one in _objects(value, name, "messages", _KEYS)]


def read_sharegpt(value: object, name: str) -> list[Message]:
    """Read a list of ShareGPT turns as messages."""
    return [_turn(one, place) for place, one in _objects(value, name, "turns", _SHAREGPT_KEYS)]


def alpaca_messages(row: Mapping[str, Any]) -> list[Message]:
    """Read system, history and instruction of an Alpaca row; `input` follows a blank line."""
    messages = read_system(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history must be a list of pairs, not {_shown(history)}")
    for at, pair in enumerate(history):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history[{at}] must be [question, answer], not {_shown(pair)}")
        messages.append({"role": "user", "content": _text(pair[0], f"history[{at}][0]")})
        messages.append({"role": "assistant", "content": _text(pair[1], f"history[{at}][1]")})
    instruction = _text(row["instruction"], "instruction")
    more = _text(row.get("input") or "", "input")
    text = f"{instruction}\n\n{more}" if more else instruction
    if not text.strip():
        raise ValueError("instruction is empty")
    return [*messages, {"role": "user", "content": text}]


def read_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read the `tools` of a row, JSON schemas or text that holds them; an empty list is none."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = msgspec.json.decode(tools)
        except msgspec.DecodeError as error:
            raise ValueError(f"tools is text that is no JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas, not {_shown(tools)}")
    return tools


def refuse_media(messages: Sequence[Message]) -> None:
    """Refuse pictures and sound where only text is read.

    Raises:
        ValueError: a message holds one.
    """
    for at, message in enumerate(messages):
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part["type"] in MEDIA_TYPES:
                raise ValueError(
                    f"messages[{at}] holds a picture or sound; give the model's processor "
                    "(--processor), or leave it out"
                )


def read_number(row: Mapping[str, Any], name: str, default: float = 1.0) -> float:
    """Read a number of 0 or more that a row may carry."""
    value = row.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError(f"{name} is {_shown(value)}; it must be a number of 0 or more")
    return float(value)


def read_system(row: Mapping[str, Any]) -> list[Message]:
    """Read the message of a row's `system`; none where it has none."""
    if not row.get("system"):
        return []
    return [{"role": "system", "content": _text(row["system"], "system")}]


def _openai(row: Mapping[str, Any]) -> list[Message]:
    messages = read_messages(row["messages"], "messages")
    system = read_system(row)
    if system and messages[0]["role"] == "system":
        if messages[:1] != system:
            raise ValueError("`system` is not the first message of `messages`; keep one of them")
        return messages
    return [*system, *messages]


def _sharegpt(row: Mapping[str, Any]) -> list[Message]:
    return [*read_system(row), *read_sharegpt(row["conversations"], "conversations")]


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    if "output" not in row:
        raise ValueError("`instruction` without `output`; an Alpaca row has both")
    answer = {"role": "assistant", "content": _text(row["output"], "output")}
    return [*alpaca_messages(row), _checked(answer, "output")]


_FORMS: dict[str, Callable[[Mapping[str, Any]], list[Message]]] = {
    "messages": _openai,
    "conversations": _sharegpt,
    "instruction": _alpaca,
}


def _objects(
    value: object, name: str, what: str, keys: set[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each object of a list, whose keys must be among these, with its place."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of {what}, not {_shown(value)}")
    for at, one in enumerate(value):
        place = f"{name}[{at}]"
        if not isinstance(one, dict):
            raise ValueError(f"{place} must be an object, not {_shown(one)}")
        if unknown := sorted(set(one) - keys):
            raise ValueError(
                f"{place} has an unknown key {unknown[0]!r}; it may have {sorted(keys)}"
            )
        yield place, one


def _role(value: object, roles: Mapping[str, str], place: str) -> str:
    if not isinstance(value, str) or value not in roles:
        raise ValueError(f"{place} is {_shown(value)}; it must be one of {', '.join(roles)}")
    return roles[value]


def _message(value: dict[str, Any], place: str) -> Message:
    if "role" not in value:
        raise ValueError(
            f"{place} must have a `role`, as in role and content; it is {_shown(value)}"
        )
    _role(value["role"], _ROLES, f"{place}.role")
    message = {key: one for key, one in value.items() if one is not None}
    content = message.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text":
                _text(part.get("text"), f"{place}.content[{at}].text")
            elif not isinstance(kind, str) or kind not in MEDIA_TYPES:
                raise ValueError(
                    f"{place}.content[{at}] is no text, picture or sound; nothing else is "
                    "trained on"
                )
    elif content is not None:
        _text(content, f"{place}.content")
    return _checked(message, place)


def _turn(value: dict[str, Any], place: str) -> Message:
    if not {"from", "value"} <= set(value):
        raise ValueError(f"{place} must have `from` and `value`, not {_shown(value)}")
    role = _role(value["from"], _SHAREGPT_ROLES, f"{place}.from")
    text = _text(value["value"], f"{place}.value")
    message: Message = {"role": role, "content": text}
    if value["from"] == "function_call":
        message |= {"content": "", "tool_calls": _calls(text, place)}
    if value.get("weight") is not None:
        message["weight"] = value["weight"]
    return _checked(message, place)


def _checked(message: Message, place: str) -> Message:
    """Check that a message is not empty and its weight is 0 or 1."""
    if message.get("weight", 0) not in (0, 1):
        raise ValueError(f"{place}.weight is {_shown(message['weight'])}; it must be 0 or 1")
    filled = message.get("content") or message.get("tool_calls")
    if message["role"] in ("assistant", "user") and not filled:
        raise ValueError(f"{place} is an empty message of the {message['role']}; give it a content")
    if not filled and not isinstance(message.get("content"), str):
        raise ValueError(
            f"{place} is a message of the role {message['role']} without content; give it a text, "
            "which may be empty"
        )
    return message


def _calls(text: str, place: str) -> list[dict[str, Any]]:
    try:
        call = msgspec.json.decode(text, type=dict[str, Any])
        function = {"name": call["name"], "arguments": call["arguments"]}
    except (msgspec.DecodeError, KeyError) as error:
        raise ValueError(
            f"{place}.value must be JSON with `name` and `arguments`, not {_shown(text)}"
        ) from error
    return [{"type": "function", "function": function}]


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place} must be text, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
