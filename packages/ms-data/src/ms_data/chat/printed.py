"""Checks that a chat template renders everything in a conversation.

Templates silently drop unsupported content, such as tool calls, reasoning, system messages or
names. The model would then be trained on something other than the data.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from ms_data.chat.messages import Message

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_END_OF_REASONING = "</think>"
_REMEDY = "use a template that prints it, or remove it from the data"


def check_printed(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    text: str,
    spans: Sequence[tuple[int, int]],
    trained: Container[int],
) -> None:
    """Check that a rendered conversation contains every text of its messages and tools.

    White space is ignored, and a text may be JSON-encoded. Every text must have a separate
    occurrence, longer texts first, so two equal answers must both be printed.

    Args:
        messages: the conversation.
        tools: the available tools.
        text: the rendered conversation.
        spans: spans of `text` that are trained on.
        trained: indices of the messages that are trained on.

    Raises:
        ValueError: a text is missing; names its location.
    """
    remaining = _without_spaces(text)  # text without the occurrences found so far
    # NUL separates the spans, so that no text matches across two of them.
    trained_text = _without_spaces("\0".join(text[start:stop] for start, stop in spans))
    expected: list[tuple[str, str]] = []
    for index, message in enumerate(messages):
        message_location, is_trained = f"messages[{index}]", index in trained
        for location, content in _content_texts(message, message_location):
            if message["role"] == "assistant" and not is_trained:
                # Templates drop the reasoning of earlier turns, as at inference.
                content = content.rpartition(_END_OF_REASONING)[2]
            elif is_trained and not _occurring_forms(content, trained_text):
                raise ValueError(
                    f"{location} is not in the text that is trained on; {_REMEDY}, or correct the "
                    "{% generation %} tags"
                )
            expected.append((content, location))
        if is_trained:
            thoughts = [(key, message[key]) for key in REASONING_KEYS if message.get(key)]
            expected += {content: f"{message_location}.{key}" for key, content in thoughts}.items()
        expected += _call_texts(message.get("tool_calls"), message_location)
    for index, tool in enumerate(tools or ()):
        function = tool.get("function", tool)
        for key in ("name", "description"):
            description = function.get(key) if isinstance(function, Mapping) else None
            if isinstance(description, str):
                expected.append((description, f"tools[{index}].{key}"))
    # Longest first: a short text must not use up a part of a longer one.
    for content, location in sorted(expected, key=lambda pair: -len(pair[0])):
        occurrence = next(iter(_occurring_forms(content, remaining)), None)
        if occurrence is None:
            raise ValueError(f"{location} is not printed by the chat template; {_REMEDY}")
        remaining = remaining.replace(occurrence, "\0", 1) if occurrence else remaining
    full_text = _without_spaces(text)
    for index, message in enumerate(messages):
        # A tool message repeats the name of its call, so it needs no separate occurrence.
        if isinstance(message.get("name"), str) and not _occurring_forms(
            message["name"], full_text
        ):
            raise ValueError(
                f"messages[{index}].name is not printed by the chat template; {_REMEDY}"
            )


def _content_texts(message: Message, location: str) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of a content, or of its text parts."""
    content = message.get("content")
    if isinstance(content, str):
        yield f"{location}.content", content
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if part.get("type") == "text":
            yield f"{location}.content[{index}].text", part["text"]


def _call_texts(calls: Any, message_location: str) -> Iterator[tuple[str, str]]:
    """Yield the texts of tool calls with their locations."""
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        location = f"{message_location}.tool_calls[{index}]"
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(
                    f"{location}: arguments is a string but not JSON: {error}"
                ) from error
        if isinstance(function.get("name"), str):
            yield function["name"], f"{location}.name"
        for text in _leaves(arguments):
            yield text, f"{location}.arguments"


def _leaves(value: Any) -> Iterator[str]:
    """Yield all keys and strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)


def _occurring_forms(string: str, text: str) -> list[str]:
    """Return the forms in which a string occurs in a text: plain, or JSON-encoded."""
    forms = dict.fromkeys(
        _without_spaces(form)
        for form in (
            string,
            json.dumps(string, ensure_ascii=False)[1:-1],
            json.dumps(string)[1:-1],
        )
    )
    return [form for form in forms if form in text]


def _without_spaces(text: str) -> str:
    return "".join(text.split())
