"""Reads preferences in the published formats: pairs of responses, and responses with a label.

A pair is a prompt, a chosen and a rejected response:

 keys | content |
---|---|
 `prompt`, `chosen`, `rejected` | strings; or message lists; or a string prompt and message lists |
 `chosen`, `rejected` | complete message lists, whose common beginning is the prompt |
 `conversations` or `messages`, `chosen`, `rejected` | a history, and one response each |
 `instruction`, `input`, `chosen`, `rejected` | an Alpaca prompt, and one string each |

A labeled response (unpaired preference) is a prompt, a completion and a label:

 keys | content |
---|---|
 `prompt`, `completion`, `label` | strings; or message lists; or a string and a message list |
 `messages` or `conversations`, `label` | a conversation, whose last message is the completion |

In every format, `system` is the first message of the prompt. `margin` is the margin by which the
chosen response is better, `weight` the weight of the pair or response. `label` is true or 1 for a
desirable response, false or 0 for an undesirable one.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ms_data.arguments import check_type
from ms_data.chat.messages import (
    Message,
    alpaca_messages,
    check_other_keys,
    read_messages,
    read_number,
    read_sharegpt,
    read_system,
    read_tools,
)


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two responses to one prompt."""

    prompt: list[Message]
    chosen: list[Message]
    """The preferred response, usually a single message."""
    rejected: list[Message]
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0
    margin: float = 0.0


def read_pair(row: Mapping[str, Any]) -> Pair:
    """Read the preference pair in a row.

    Raises:
        ValueError: the row matches no format, or is invalid; names the location.
    """
    check_type("row", row, Mapping, "a mapping", error=ValueError)
    if not {"chosen", "rejected"} <= set(row):
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(
            f"a preference pair must have `chosen` and `rejected`, the row has the keys {keys}"
        )
    check_other_keys(row)
    prompts = [key for key in ("prompt", "messages", "conversations", "instruction") if key in row]
    if len(prompts) > 1:
        raise ValueError(f"two prompts, {prompts[0]!r} and {prompts[1]!r}; remove either")
    chosen, rejected = _answer(row["chosen"], "chosen"), _answer(row["rejected"], "rejected")
    prompt = _prompt(row, prompts[0]) if prompts else []
    # The responses may repeat the prompt; then they are complete message lists.
    if len(prompts) == 0 or (chosen[: len(prompt)] == prompt == rejected[: len(prompt)]):
        shared = _common_prefix(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise ValueError("no prompt: add `prompt`, or message lists with a common beginning")
    if prompts != ["instruction"]:
        prompt = _with_system(read_system(row), prompt)
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or answer[0]["role"] != "assistant" or answer[-1]["role"] != "assistant":
            raise ValueError(f"{name} must start and end with an assistant message")
    if chosen == rejected:
        raise ValueError("chosen and rejected are identical, so neither is preferred")
    return Pair(
        prompt=prompt,
        chosen=chosen,
        rejected=rejected,
        tools=read_tools(row),
        weight=read_number(row, "weight"),
        margin=read_number(row, "margin", 0.0),
    )


class Unpaired(msgspec.Struct, frozen=True, kw_only=True):
    """A response to a prompt, labeled desirable or undesirable."""

    prompt: list[Message]
    completion: list[Message]
    label: bool
    """True if the response is desirable."""
    tools: list[dict[str, Any]] | None = None
    weight: float = 1.0


def read_unpaired(row: Mapping[str, Any]) -> Unpaired:
    """Read the labeled response in a row.

    Raises:
        ValueError: the row matches no format, or is invalid; names the location.
    """
    check_type("row", row, Mapping, "a mapping", error=ValueError)
    prompts = [key for key in ("prompt", "messages", "conversations") if key in row]
    if "label" not in row or len(prompts) != 1 or ("prompt" in row) != ("completion" in row):
        keys = ", ".join(map(repr, row)) or "none"
        raise ValueError(
            "a labeled response must have `prompt`, `completion` and `label`, or `messages` and "
            f"`label`, the row has the keys {keys}"
        )
    check_other_keys(row)
    label = row["label"]
    if label not in (0, 1):  # also False and True
        raise ValueError(f"label must be true, false, 1 or 0, got {str(label)[:40]!r}")
    prompt = _prompt(row, prompts[0])
    if "completion" in row:
        completion = _answer(row["completion"], "completion")
        if completion[: len(prompt)] == prompt:  # a complete message list
            completion = completion[len(prompt) :]
    else:
        prompt, completion = prompt[:-1], prompt[-1:]
    if not prompt:
        raise ValueError("no prompt: the conversation must have a message before its last one")
    if not completion or {completion[0]["role"], completion[-1]["role"]} != {"assistant"}:
        raise ValueError("the completion must start and end with an assistant message")
    return Unpaired(
        prompt=_with_system(read_system(row), prompt),
        completion=completion,
        label=bool(label),
        tools=read_tools(row),
        weight=read_number(row, "weight"),
    )


def _prompt(row: Mapping[str, Any], key: str) -> list[Message]:
    value = row[key]
    if key == "instruction":
        return alpaca_messages(row)
    if key == "conversations":
        return read_sharegpt(value, key)
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    return read_messages(value, key)


def _with_system(system: list[Message], prompt: list[Message]) -> list[Message]:
    """Prepend the row's system message to the prompt, unless it is there already."""
    if system and prompt[0]["role"] == "system":
        if prompt[:1] != system:
            raise ValueError("`system` is not the system message of the prompt; remove either")
        return prompt
    return [*system, *prompt]


def _answer(value: object, name: str) -> list[Message]:
    if isinstance(value, str) and value:
        return [{"role": "assistant", "content": value}]
    turns = [value] if isinstance(value, dict) else value
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]:
        return read_sharegpt(turns, name)
    return read_messages(turns, name)


def _common_prefix(a: list[Message], b: list[Message]) -> int:
    """Count the messages of the common beginning, excluding the last message of both lists."""
    shared = 0
    for first, second in zip(a[:-1], b[:-1], strict=False):
        if first != second:
            break
        shared += 1
    return shared
