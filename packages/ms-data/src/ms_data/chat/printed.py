"""Checks that a chat template prints all that a conversation says.

A template prints what its author thought of. Tool calls, thoughts, a system message or a name that
it has no place for are left out without a word, and the model then learns from something else than
the data.
"""

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from ms_data.chat.messages import Message

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_END_OF_THOUGHT = "</think>"
_REMEDY = "take a template that prints it, or leave it out of the data"


def check_printed(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    text: str,
    spans: Sequence[tuple[int, int]],
    trained: Container[int],
) -> None:
    """Check that a rendered conversation holds every text of its messages and tools.

    White space is not compared, and a text may be written as JSON. Each text needs a place of its
    own, longer ones first, so that two equal answers must both be printed.

    Args:
        messages: the conversation.
        tools: the tools that are offered in it.
        text: the rendered conversation.
        spans: where the answers that are trained on are in `text`.
        trained: numbers of the messages that are trained on.

    Raises:
        ValueError: a text is missing; names its place.
    """
    rest = _plain(text)
    learned = _plain("\0".join(text[start:stop] for start, stop in spans))
    wanted: list[tuple[str, str]] = []
    for at, message in enumerate(messages):
        place, is_trained = f"messages[{at}]", at in trained
        for where, said in _contents(message, place):
            if message["role"] == "assistant" and not is_trained:
                # Templates leave out the thoughts of earlier turns, as a model is used.
                said = said.rpartition(_END_OF_THOUGHT)[2]
            elif is_trained and not _forms_in(said, learned):
                raise ValueError(
                    f"{where} is not in the text that is trained on; {_REMEDY}, or correct the "
                    "{% generation %} marks"
                )
            wanted.append((said, where))
        if is_trained:
            thoughts = [(key, message[key]) for key in THOUGHTS if message.get(key)]
            wanted += {said: f"{place}.{key}" for key, said in thoughts}.items()
        wanted += _called(message.get("tool_calls"), place)
    for at, tool in enumerate(tools or ()):
        function = tool.get("function", tool)
        for key in ("name", "description"):
            about = function.get(key) if isinstance(function, Mapping) else None
            if isinstance(about, str):
                wanted.append((about, f"tools[{at}].{key}"))
    for said, where in sorted(wanted, key=lambda pair: -len(pair[0])):
        form = next(iter(_forms_in(said, rest)), None)
        if form is None:
            raise ValueError(f"{where} is not printed by the chat template; {_REMEDY}")
        rest = rest.replace(form, "\0", 1) if form else rest
    whole = _plain(text)
    for at, message in enumerate(messages):
        # A tool's name is that of its call, which has the place.
        if isinstance(message.get("name"), str) and not _forms_in(message["name"], whole):
            raise ValueError(f"messages[{at}].name is not printed by the chat template; {_REMEDY}")


def _contents(message: Message, place: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of a content, or of each text part of it."""
    content = message.get("content")
    if isinstance(content, str):
        yield f"{place}.content", content
    for at, part in enumerate(content if isinstance(content, list) else ()):
        if part.get("type") == "text":
            yield f"{place}.content[{at}].text", part["text"]


def _called(calls: Any, place: str) -> Iterator[tuple[str, str]]:
    """Yield each text of tool calls with its place."""
    for at, call in enumerate(calls if isinstance(calls, list) else ()):
        where = f"{place}.tool_calls[{at}]"
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise ValueError(f"{where}: arguments are text that is no JSON: {error}") from error
        if isinstance(function.get("name"), str):
            yield function["name"], f"{where}.name"
        for said in _leaves(arguments):
            yield said, f"{where}.arguments"


def _leaves(value: Any) -> Iterator[str]:
    """Yield each key and each text of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)


def _forms_in(said: str, text: str) -> list[str]:
    """Return the forms in which a text is written in another one: plain, or as JSON."""
    forms = dict.fromkeys(
        _plain(form)
        for form in (
            said,
            json.dumps(said, ensure_ascii=False)[1:-1],
            json.dumps(said)[1:-1],
        )
    )
    return [form for form in forms if form in text]


def _plain(text: str) -> str:
    return "".join(text.split())
