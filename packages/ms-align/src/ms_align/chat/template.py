"""Renders chat templates like transformers, with limits on time and memory.

transformers renders a template in the caller's process without limits. Here a worker process
renders it and is killed when it exceeds a limit (`chat.worker`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ms_align.chat.process import ask
from ms_align.errors import ConfigError, DataError

TEMPLATE_LIMIT_CHARACTERS = 1 << 20
_TO_BE_CONTINUED = "\ufdd2"
"""A Unicode noncharacter that marks the end of the text to continue."""


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    continue_last: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    generation_prompt: bool = True,
) -> str:
    """Render a chat, ending where the assistant's reply starts.

    Args:
        tokenizer: transformers tokenizer with a chat template.
        messages: at least one; each has `role` and `content`.
        continue_last: end inside the last message, so that the model continues it.
        tools: JSON schemas of the tools that the model may call.
        generation_prompt: False to end after the last message.

    Raises:
        ConfigError: jinja2 is not installed.
        DataError: the tokenizer has no template, the template rejects the chat, or rendering
            exceeds the limits on time, memory or length.
    """
    chat = [dict(message) for message in messages]
    if not continue_last:
        return _render(tokenizer, chat, prompt=generation_prompt, tools=tools)
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str):
        raise DataError("the last message must have a text to continue; add its `content`")
    # The space after the mark shows whether the template strips messages.
    chat[-1]["content"] = f"{content}{_TO_BE_CONTINUED} "
    text = _render(tokenizer, chat, prompt=False)
    start, mark, end = text.rpartition(_TO_BE_CONTINUED)
    if not mark or content.strip() not in start:
        raise DataError(
            "the chat template must print the last message unchanged for it to be continued; use "
            "another template"
        )
    # A template that strips messages has removed the space after the mark.
    return start if end.startswith(" ") else start.rstrip()


def _render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    *,
    prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} has no chat template, "
            "which a chat prompt needs; use texts as prompts, or a tokenizer with a chat template"
        )
    if not messages:
        raise DataError("a chat must have at least one message, got none; add one")
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:  # several templates and no default
        raise DataError(f"no chat template: {' '.join(str(error).split())[:200]}") from error
    compile_request = {"source": source, "tokens": tokenizer.special_tokens_map, "today": None}
    render_request: dict[str, Any] = {
        "messages": messages,
        "tools": list(tools) if tools else None,
        "variables": {},
        "prompt": prompt,
    }
    try:
        name = _name(source, compile_request)
        answer = _ask("render", name, render_request)
        if "unknown" in answer:
            _ask("compile", name, compile_request)
            answer = _ask("render", name, render_request)
    except (RecursionError, TypeError, ValueError) as error:
        if isinstance(error, DataError | ConfigError):
            raise
        raise DataError(f"the messages are not valid JSON: {error}; correct them") from error
    return str(answer["text"])


def _name(source: str, compile_request: Mapping[str, Any]) -> str:
    """Return the hash of a template and its special tokens, by which the worker caches it."""
    try:
        content = json.dumps(compile_request, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        content = b""
    if not content or len(source) > TEMPLATE_LIMIT_CHARACTERS:
        raise DataError(
            "not a valid chat template: it or a special token is not valid text, or it exceeds "
            f"{TEMPLATE_LIMIT_CHARACTERS >> 20} MiB; use another template"
        )
    return hashlib.sha256(content).hexdigest()


def _ask(action: str, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
    answer = ask({"do": action, "name": name, **request}, needs="ms-align[hf]", error=ConfigError)
    if "limit" in answer:
        raise DataError(
            f"the chat template {answer['limit']}, so it was stopped; check it or use another "
            "template"
        )
    if "invalid" in answer:
        raise DataError(f"not a valid chat template: {answer['invalid']}")
    if "refused" in answer:
        raise DataError(answer["refused"])
    return answer
