"""Renders messages with a tokenizer's chat template, and finds the spans to train on.

A template is a Jinja program that comes with a tokenizer. It runs in Jinja's immutable sandbox with
the settings, filters and globals of transformers, so that the text is identical (a test compares
the two), and in a separate process with limits on time, memory and output (`chat.worker`), so that
a template cannot hang this process or exhaust its memory. The spans of the assistant are found

1. by the template's own tags `{% generation %}` and `{% endgeneration %}`, if it has them;
2. otherwise by prefixes: the rendering up to an answer, with generation prompt, must be a prefix of
the rendering including the answer, which must be a prefix of the complete text. If a template
rewrites earlier turns, the check fails, and the conversation is rejected rather than trained on
incorrectly.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ms_data.arguments import check_items, check_type, shown
from ms_data.chat.messages import Message
from ms_data.chat.printed import check_printed
from ms_data.chat.process import ask
from ms_data.errors import DataError, SettingError, TokenizerError, printable
from ms_data.files.untrusted import check_path, decoding, read_json, read_text

TEMPLATE_LIMIT_BYTES = 1 << 20
_PROBE = "quartz"  # a word that templates do not print themselves


def _check_messages(messages: object) -> None:
    """Check the types of messages.

    Raises:
        ValueError: they are not a list of mappings with a role.
    """
    check_items("messages", messages, Mapping, "mappings", error=ValueError)
    for message in messages:  # type: ignore[attr-defined]
        check_type("role", message.get("role"), str, "a string", error=ValueError)


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Character spans to train on, in order and disjoint."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        source: Jinja source.
        special_tokens: special tokens by role, such as `bos_token`, for the template.
        today: date for templates that print one. None: the current day.

    Raises:
        SettingError: jinja2 is not installed.
        TokenizerError: the template is not valid Jinja, or compiling it exceeds the limits.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> None:
        tokens = {} if special_tokens is None else special_tokens
        if not isinstance(source, str) or not isinstance(tokens, Mapping):
            raise TokenizerError(
                "a chat template must be a string and its special tokens a dict, got"
                f" {shown(source if isinstance(tokens, Mapping) else tokens)}; pass the"
                " text, as in chat_template.jinja"
            )
        check_type("today", today, date, "a date", error=TokenizerError, optional=True)
        if len(source) > TEMPLATE_LIMIT_BYTES or not _is_text([source, special_tokens or {}]):
            raise TokenizerError(
                "not a valid chat template: it or its special tokens are not valid text, or longer "
                f"than {TEMPLATE_LIMIT_BYTES >> 20} MiB"
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.today = today
        self.asks_date = "strftime_now" in source
        """Whether the template prints the date."""
        inputs = [source, self.special_tokens, str(today) if self.asks_date else ""]
        # The date counts only if the template prints it, or the digest would change every day.
        content = json.dumps(inputs, sort_keys=True).encode()
        self.digest = xxhash.xxh3_128_hexdigest(content)
        """xxh3-128 of everything that affects its output besides the messages, hexadecimal."""
        self._probed = False
        self._used_tokens = self._compile()

    @classmethod
    def load(
        cls, path: str | Path, *, name: str | None = None, today: date | None = None
    ) -> "ChatTemplate":
        """Load a template.

        Args:
            path: a tokenizer folder, with `chat_template.jinja`, or a `tokenizer_config.json` or
                `chat_template.json` that contains the template; or a Jinja file.
            name: name of the template if there are several. None: `default`.
            today: see `ChatTemplate`.

        Raises:
            TokenizerError: no template was found, or it cannot be read.
        """
        check_path("a chat template", path, error=TokenizerError)
        path = Path(path)
        try:
            with decoding(path, error=TokenizerError):
                if os.path.isdir(path):
                    source, tokens = _from_folder(path, name)
                else:
                    source, tokens = _read_template(path), {}
        except TokenizerError as error:
            raise TokenizerError(
                f"no chat template: {error}; pass a tokenizer folder with tokenizer_config.json "
                "or chat_template.jinja"
            ) from error
        try:
            return cls(source, special_tokens=tokens, today=today)
        except TokenizerError as error:
            raise TokenizerError(f"{printable(path)}: {error}") from error

    def with_tokens_of(self, folder: Path | None) -> "ChatTemplate":
        """Return this template with the special tokens of a tokenizer, unless it has some already.

        Args:
            folder: tokenizer folder with a `tokenizer_config.json`.

        Raises:
            SettingError: the template uses special tokens, but no file defines them.
            TokenizerError: tokenizer_config.json cannot be read.
        """
        used = self._used_tokens
        if self.special_tokens or not used:
            return self
        config = folder / "tokenizer_config.json" if folder else None
        if config is None or not config.exists():
            raise SettingError(
                f"the chat template uses {used[0]}, which is not defined; pass a tokenizer folder "
                "with tokenizer_config.json as the tokenizer or as the template"
            )
        try:
            defined = _special_tokens(_read_config(config))
        except TokenizerError as error:
            raise TokenizerError(f"{error}; download the tokenizer folder again") from error
        tokens = {name: defined[name] for name in used if name in defined}
        return ChatTemplate(self.source, special_tokens=tokens, today=self.today)

    def files(self) -> dict[str, bytes]:
        """Return the files from which `load` reads this template, by name."""
        config = json.dumps(self.special_tokens, indent=2, sort_keys=True, ensure_ascii=False)
        return {
            "chat_template.jinja": self.source.encode(),
            "tokenizer_config.json": config.encode() + b"\n",
        }

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """Render messages like transformers' `apply_chat_template`.

        Args:
            messages: at least one message; keys with the value None are ignored.
            tools: JSON schemas of functions.
            add_generation_prompt: append the prompt for the assistant's next message.
            variables: additional variables of the template.

        Raises:
            ValueError: the template rejects the messages; gives the reason.
            TokenizerError: rendering exceeds the limits on time, memory or output size.
        """
        check_type(
            "add_generation_prompt", add_generation_prompt, bool, "True or False", error=ValueError
        )
        options = {"prompt": bool(add_generation_prompt), "variables": variables}
        return str(self._send("render", messages, tools, **options)["text"])

    def render_for_training(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        first: int = 0,
    ) -> Rendered:
        """Render a conversation, and find the spans of the assistant's messages.

        Args:
            messages: assistant messages are trained on, unless their `weight` is 0.
            tools: JSON schemas of functions.
            first: messages before this index are not trained on.

        Raises:
            ValueError: the template rejects the messages or does not print all of them, or the
                assistant's spans are empty or cannot be determined.
            TokenizerError: see `render`.
        """
        _check_messages(messages)
        if not self._probed:  # once per template
            self._probe()
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        trained = [index for index in turns if index >= first and messages[index].get("weight", 1)]
        rendered = self._find_spans(messages, tools, turns, trained)
        check_printed(messages, tools, rendered.text, rendered.spans, frozenset(trained))
        return rendered

    def _find_spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        turns: Sequence[int],
        trained: Sequence[int],
    ) -> Rendered:
        """Render a conversation, and find the spans of the messages in `trained`."""
        # `weight` is for training only; the template sees what transformers would pass.
        plain = [{key: message[key] for key in message if key != "weight"} for message in messages]
        reply = self._send("train", plain, tools, turns=list(turns), wanted=list(trained))
        text: str = reply["text"]
        # A span of white space alone has nothing to learn.
        spans = [(start, stop) for start, stop in reply["spans"] if text[start:stop].strip()]
        if not spans:
            raise ValueError(
                "the template prints no assistant text in this conversation, so there is nothing "
                "to train on; add an answer of weight 1, or fix the template"
            )
        return Rendered(text, tuple(spans))

    def _probe(self) -> None:
        """Check with a test conversation that the spans to train on contain the answer.

        Raises:
            ValueError: the answer's text is outside the spans.
        """
        self._probed = True
        messages = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text, spans = self._find_spans(messages, None, [1], [1])
        except TokenizerError:
            raise
        except (
            ValueError
        ):  # the template rejects the test messages; every conversation is checked separately
            return
        if not any(_PROBE in text[start:stop] for start, stop in spans):
            # Probed again for the next conversation, which is then rejected as well.
            self._probed = False
            raise ValueError(
                "the template prints no assistant text, so there is nothing to train on; fix the "
                "template, or mark the answers in it with {% generation %}"
            )

    def _send(
        self,
        action: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        **options: Any,
    ) -> dict[str, Any]:
        """Send a request about messages to the render process."""
        _check_messages(messages)
        if tools is not None:
            check_items("tools", tools, Mapping, "JSON schemas", error=ValueError)
        if not messages:
            raise ValueError("a conversation must have at least one message")
        request = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "variables": {},
            **options,
        }
        try:
            reply = self._request(action, request)
            # the render process was restarted, and lost the compiled template
            if "unknown" in reply:
                self._compile()
                reply = self._request(action, request)
        except DataError:
            raise
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"the messages cannot be encoded as JSON: {error}; fix them"
            ) from error
        if "refused" in reply:
            raise ValueError(reply["refused"])
        return reply

    def _compile(self) -> tuple[str, ...]:
        """Compile the template; return the special tokens that it uses."""
        today = str(self.today) if self.today else None
        settings = {"source": self.source, "tokens": self.special_tokens, "today": today}
        reply = self._request("compile", settings)
        if "invalid" in reply:
            raise TokenizerError(f"not a valid chat template: {reply['invalid']}")
        return tuple(reply["reads"])

    def _request(self, action: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        request = {"do": action, "name": self.digest, **fields}
        reply = ask(request, needs="ms-data[chat]", error=SettingError)
        if "limit" in reply:
            raise TokenizerError(
                f"the chat template {reply['limit']}, so it was stopped; fix it, or use another one"
            )
        return reply


def _from_folder(folder: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Read the template and the special tokens of a tokenizer folder."""
    path = folder / "tokenizer_config.json"
    config = _read_config(path) if path.exists() else {}
    # Template files take precedence over the template in tokenizer_config.json, as in transformers.
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files = {"default": folder / "chat_template.jinja", **files}
    legacy = folder / "chat_template.json"
    if files:
        templates = {name: _read_template(path) for name, path in files.items()}
    elif config.get("chat_template") is None and legacy.exists():
        # Older processors wrote this file instead of chat_template.jinja.
        templates = _templates_by_name(_read_config(legacy).get("chat_template"))
    else:
        templates = _templates_by_name(config.get("chat_template"))
    template_name = name or "default"
    if template_name not in templates:
        available = ", ".join(templates) or "none"
        raise ValueError(f"no template is named {template_name!r}; the templates are: {available}")
    return templates[template_name], _special_tokens(config)


def _read_template(path: Path) -> str:
    return read_text(path, error=TokenizerError, limit_bytes=TEMPLATE_LIMIT_BYTES)


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], error=TokenizerError)


def _is_text(value: Any) -> bool:
    """Return whether all strings in a value are valid Unicode, without lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json by role, such as `bos_token`."""
    values_by_role = {key: value for key, value in config.items() if key.endswith("_token")}
    # A token is a string, or an `AddedToken` saved as an object.
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in values_by_role.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _templates_by_name(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and all(isinstance(item, str) for item in value.values()):
        return value
    if value is None:
        return {}
    if not isinstance(value, list) or not all(
        isinstance(item, dict) and {"name", "template"} <= set(item) for item in value
    ):
        raise ValueError("chat_template must be a string or a list of `name` and `template`")
    return {str(item["name"]): str(item["template"]) for item in value}
