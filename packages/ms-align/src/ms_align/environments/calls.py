"""Tool calls in a response, in the format of the model's chat template.

Calls are parsed as JSON and never evaluated, as the text comes from a model.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from attrs import frozen

NUMBER_CHARACTERS = 400
"""Longest number in arguments; Python refuses to parse integers much longer than this."""


@frozen(kw_only=True)
class ToolCall:
    """A tool call by the model."""

    name: str
    arguments: dict[str, Any]
    problem: str = ""
    """Error message for the model, if the call is malformed; "" for a valid call."""


@frozen(kw_only=True)
class Reply:
    """A response, split into its parts."""

    content: str
    """Text outside thoughts and calls."""
    reasoning: str = ""
    """Thoughts: the text up to `</think>`."""
    calls: tuple[ToolCall, ...] = ()

    def message(self, call_ids: list[str]) -> dict[str, Any]:
        """Return the assistant message in OpenAI's format."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call_id, call in zip(call_ids, self.calls, strict=True)
            ]
        return message


def parse_reply(text: str, tool_format: str) -> Reply:
    """Split a response into thoughts, text and tool calls.

    Args:
        text: decoded response with its special tokens, without the stop token.
        tool_format: a key of `TOOL_FORMATS`.
    """
    reasoning, end, content = text.rpartition("</think>")
    if not end:
        content = text
    reasoning = reasoning.replace("<think>", "").strip()
    content, calls = TOOL_FORMATS[tool_format](content)
    return Reply(content=content.strip(), reasoning=reasoning, calls=tuple(calls))


def tool_format_of(template: str) -> str:
    """Return the format of tool calls that a chat template prints; "hermes" if it is unknown."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and '"parameters": ' in template:
        return "llama3"
    return "hermes"


def _hermes(text: str) -> tuple[str, list[ToolCall]]:
    """Parse calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    parts = re.split(r"<tool_call>(.*?)(?:</tool_call>|\Z)", text, flags=re.DOTALL)
    # re.split with one group alternates between text (even) and calls (odd).
    return "".join(parts[::2]), [_call(_parsed(part), part) for part in parts[1::2]]


def _mistral(text: str) -> tuple[str, list[ToolCall]]:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]`, or `[TOOL_CALLS]name{...}`.

    Newer models write the second form: one mark per call, and an optional `[ARGS]` between name
    and arguments.
    """
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    for part in parts:
        name = re.match(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\])?\s*(?=\{)", part)
        if name:
            calls.append(_call({"name": name[1], "arguments": _parsed(part[name.end() :])}, part))
            continue
        parsed = _parsed(part)
        entries = parsed if isinstance(parsed, list) and parsed else [parsed]
        calls += [_call(entry, part) for entry in entries]
    return content, calls


def _llama3(text: str) -> tuple[str, list[ToolCall]]:
    """Parse a response that is one JSON object `{"name": ..., "parameters": {...}}`.

    Llama 3.1 may print `<|python_tag|>` before it, and several objects with `;` between them.
    """
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not body.startswith("{"):
        return text, []
    entries: list[Any] = []
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_integer)
    while body:
        try:
            entry, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            # A final answer may be JSON too; only objects with a name are calls.
            return (text, []) if '"name"' not in body else ("", [_call(None, body)])
        entries.append(entry)
        body = body[end:].lstrip("; \n")
    if not all(isinstance(entry, dict) and "name" in entry for entry in entries):
        return text, []
    return "", [_call(entry, text) for entry in entries]


TOOL_FORMATS: dict[str, Callable[[str], tuple[str, list[ToolCall]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}
"""Parsers of tool calls; each returns the remaining text and the calls."""


def _call(entry: Any, text: str) -> ToolCall:
    """Build a call from parsed JSON; a malformed one gets a `problem` for the model."""
    entry = entry.get("function", entry) if isinstance(entry, dict) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        problem = f"not a JSON object with name and arguments: {text.strip()[:100]!r}"
        return ToolCall(name="", arguments={}, problem=problem)
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict):
        problem = f"the arguments of {entry['name'][:50]!r} must be a JSON object"
        return ToolCall(name=entry["name"], arguments={}, problem=problem)
    return ToolCall(name=entry["name"], arguments=arguments)


def _parsed(text: str) -> Any:
    """Parse JSON; None if it is not valid."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_int=_integer)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _integer(digits: str) -> int:
    if len(digits) > NUMBER_CHARACTERS:
        raise ValueError("the number is too long")
    return int(digits)
