"""A tokenizer's chat template, rendered as transformers renders it, under limits.

transformers runs a template in the caller's own process, for as long and in as much memory as it
takes. Here it runs in a process of its own that is stopped past its limits (`chat.worker`).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ms_align.chat.process import ask
from ms_align.errors import ConfigError, DataError

TEMPLATE_LIMIT_CHARACTERS = 1 << 20
_TO_BE_CONTINUED = "\ufdd2"
"""A character that Unicode keeps for no one, behind the words that are to be continued."""


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, continue_last: bool = False
) -> str:
    """Render a chat up to where the assistant is to speak.

    Args:
        tokenizer: one of transformers, with a chat template.
        messages: at least one; each has `role` and `content`.
        continue_last: end within the last message, which is to be continued, and not behind it.

    Raises:
        ConfigError: jinja2 is not installed.
        DataError: there is no template, it refuses the chat, or it takes more time or memory or
            makes a longer text than any sound template.
    """
    chat = [dict(message) for message in messages]
    if not continue_last:
        return _render(tokenizer, chat, prompt=True)
    said = chat[-1].get("content") if chat else None
    if not isinstance(said, str):
        raise DataError("the last message is to be continued and has no text; give it a `content`")
    chat[-1]["content"] = f"{said}{_TO_BE_CONTINUED} "
    text = _render(tokenizer, chat, prompt=False)
    kept, mark, rest = text.rpartition(_TO_BE_CONTINUED)
    if not mark or said.strip() not in kept:
        raise DataError(
            "the chat template does not print the last message as it is, so it cannot be "
            "continued; take a template that does"
        )
    # A template that trims messages has taken the space behind the mark.
    return kept if rest.startswith(" ") else kept.rstrip()


def _render(tokenizer: Any, messages: list[dict[str, Any]], *, prompt: bool) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} has no chat template, "
            "and a prompt is a chat; give texts, or a tokenizer with one"
        )
    if not messages:
        raise DataError("a chat without messages; give at least one")
    try:
        source = tokenizer.get_chat_template()
    except ValueError as error:  # it has several, and none is the default
        raise DataError(f"no chat template: {' '.join(str(error).split())[:200]}") from error
    compiling = {"source": source, "tokens": tokenizer.special_tokens_map, "today": None}
    asked: dict[str, Any] = {"messages": messages, "tools": None, "variables": {}, "prompt": prompt}
    try:
        name = _name(source, compiling)
        answer = _ask("render", name, asked)
        if "unknown" in answer:
            _ask("compile", name, compiling)
            answer = _ask("render", name, asked)
    except (RecursionError, TypeError, ValueError) as error:
        if isinstance(error, DataError | ConfigError):
            raise
        raise DataError(f"the messages are no JSON: {error}; mend them") from error
    return str(answer["text"])


def _name(source: str, compiling: Mapping[str, Any]) -> str:
    """Name what a template's text depends on besides the messages."""
    try:
        content = json.dumps(compiling, sort_keys=True, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        content = b""
    if not content or len(source) > TEMPLATE_LIMIT_CHARACTERS:
        raise DataError(
            "not a valid chat template: it or a special token is no text, or longer than "
            f"{TEMPLATE_LIMIT_CHARACTERS >> 20} MiB; take another one"
        )
    return hashlib.sha256(content).hexdigest()


def _ask(do: str, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    answer = ask({"do": do, "name": name, **about}, needs="ms-align[hf]", error=ConfigError)
    if "limit" in answer:
        raise DataError(
            f"the chat template {answer['limit']}, so it was stopped; look at what it does, or "
            "take another one"
        )
    if "invalid" in answer:
        raise DataError(f"not a valid chat template: {answer['invalid']}")
    if "refused" in answer:
        raise DataError(answer["refused"])
    return answer
