"""Renders messages with a tokenizer's own chat template, and finds what is trained on.

A template is a Jinja program that comes with a tokenizer. It runs in Jinja's immutable sandbox,
with the same settings, filters and globals that transformers gives it, so that the text is the
same (tests hold both against each other), and in a process of its own with limits of time, memory
and size (`chat.worker`), so that a template can neither hang nor fill this one. What the
assistant says, which is trained on, is found

1. by the template's own marks, `{% generation %}` to `{% endgeneration %}`, where it has them;
2. otherwise by prefixes: the text up to an answer, with the prompt that asks for it, must begin
   the text with that answer, and this must begin the whole. Where a template rewrites what came
   earlier the proof fails, and the conversation is refused instead of being trained on wrongly.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ms_data.chat.messages import Message
from ms_data.chat.printed import check_printed
from ms_data.chat.process import ask
from ms_data.errors import DataError, SettingError, TokenizerError, printable
from ms_data.files.untrusted import check_path, decoding, read_json, read_text

TEMPLATE_LIMIT_BYTES = 1 << 20
_PROBE = "quartz"


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Where the assistant speaks, in characters; in order, apart from each other."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        source: Jinja text.
        special_tokens: such as `bos_token`, as the template reads them.
        today: the date that the template prints if it asks for it; None is the day it runs.

    Raises:
        SettingError: jinja2 is not installed.
        TokenizerError: the template is not valid Jinja, or compiling it takes too much.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> None:
        if len(source) > TEMPLATE_LIMIT_BYTES or not _is_text([source, special_tokens or {}]):
            raise TokenizerError(
                f"not a valid chat template: it or its special tokens are no text, or longer than "
                f"{TEMPLATE_LIMIT_BYTES >> 20} MiB"
            )
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.today = today
        self.asks_date = "strftime_now" in source
        """Whether the template prints the date."""
        seen = [source, self.special_tokens, str(today) if self.asks_date else ""]
        content = json.dumps(seen, sort_keys=True).encode()
        self.digest = xxhash.xxh3_128_hexdigest(content)
        """Hexadecimal xxh3-128 of all that its text depends on but the messages."""
        self._probed = False
        self._reads = self._compile()

    @classmethod
    def load(
        cls, path: str | Path, *, name: str | None = None, today: date | None = None
    ) -> "ChatTemplate":
        """Read a template.

        Args:
            path: a tokenizer's folder, with `chat_template.jinja`, or a `tokenizer_config.json` or
                `chat_template.json` that holds the template; or a Jinja file.
            name: which template, where there are several; by default the one named `default`.
            today: see `ChatTemplate`.

        Raises:
            TokenizerError: there is none, or it cannot be read.
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
                f"no chat template: {error}; give a tokenizer's folder with tokenizer_config.json "
                "or chat_template.jinja"
            ) from error
        try:
            return cls(source, special_tokens=tokens, today=today)
        except TokenizerError as error:
            raise TokenizerError(f"{printable(path)}: {error}") from error

    def with_tokens_of(self, folder: Path | None) -> "ChatTemplate":
        """Return this template with the special tokens that it reads, if it was given none.

        Args:
            folder: the tokenizer's, with a `tokenizer_config.json` that names them.

        Raises:
            SettingError: it reads some, and no one says what they are.
            TokenizerError: tokenizer_config.json cannot be read.
        """
        asked = self._reads
        if self.special_tokens or not asked:
            return self
        config = folder / "tokenizer_config.json" if folder else None
        if config is None or not config.exists():
            raise SettingError(
                f"the chat template reads {asked[0]}, which is given nowhere; give the folder of "
                "a tokenizer with tokenizer_config.json as the tokenizer or as the template"
            )
        try:
            known = _special_tokens(_read_config(config))
        except TokenizerError as error:
            raise TokenizerError(f"{error}; fetch the tokenizer's folder again") from error
        tokens = {name: known[name] for name in asked if name in known}
        return ChatTemplate(self.source, special_tokens=tokens, today=self.today)

    def files(self) -> dict[str, bytes]:
        """Return the files that `load` reads this template from, by name."""
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
        """Render messages as transformers' `apply_chat_template` does.

        Args:
            messages: at least one; None as a value is the same as no such key.
            tools: JSON schemas of functions.
            add_generation_prompt: end with what asks the assistant to speak.
            variables: further names that the template reads.

        Raises:
            ValueError: the template refuses the messages; says why.
            TokenizerError: it takes more time or memory than any sound template, or makes a longer
                text.
        """
        more = {"prompt": bool(add_generation_prompt), "variables": variables}
        return str(self._ask("render", messages, tools, **more)["text"])

    def render_for_training(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        first: int = 0,
    ) -> Rendered:
        """Render a conversation and find the spans of the assistant's messages.

        Args:
            messages: of any roles; the assistant's are trained on unless their `weight` is 0.
            tools: JSON schemas of functions.
            first: messages before this one are not trained on.

        Raises:
            ValueError: the template refuses the messages or does not print all of them, or it
                cannot be proved which part is the assistant's, or that part is empty.
            TokenizerError: as `render`.
        """
        if not self._probed:
            self._probe()
        turns = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        wanted = [at for at in turns if at >= first and messages[at].get("weight", 1)]
        rendered = self._train(messages, tools, turns, wanted)
        check_printed(messages, tools, rendered.text, rendered.spans, frozenset(wanted))
        return rendered

    def _train(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        turns: Sequence[int],
        wanted: Sequence[int],
    ) -> Rendered:
        """Render a conversation and find the spans of the messages `wanted`, out of `turns`."""
        plain = [{key: one[key] for key in one if key != "weight"} for one in messages]
        answer = self._ask("train", plain, tools, turns=list(turns), wanted=list(wanted))
        text: str = answer["text"]
        spans = [(start, stop) for start, stop in answer["spans"] if text[start:stop].strip()]
        if not spans:
            raise ValueError(
                "the template gives the assistant no text in this conversation, so nothing would "
                "be learnt; give it an answer of weight 1, or mend the template"
            )
        return Rendered(text, tuple(spans))

    def _probe(self) -> None:
        """Refuse a template that prints no answer where it should be trained on.

        Raises:
            ValueError: an answer's words are not in what would be trained on.
        """
        self._probed = True
        asked = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text, spans = self._train(asked, None, [1], [1])
        except TokenizerError:
            raise
        except ValueError:  # it wants other messages than these; what it is given is judged alone
            return
        if not any(_PROBE in text[start:stop] for start, stop in spans):
            self._probed = False
            raise ValueError(
                "the template gives the assistant no text of its own, so nothing would be learnt; "
                "mend the template, or mark the answers in it with {% generation %}"
            )

    def _ask(
        self,
        do: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        **more: Any,
    ) -> dict[str, Any]:
        """Ask the process that renders about some messages."""
        if not messages:
            raise ValueError("a conversation without messages; give at least one")
        request = {
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "variables": {},
            **more,
        }
        try:
            answer = self._request(do, request)
            if "unknown" in answer:
                self._compile()
                answer = self._request(do, request)
        except DataError:
            raise
        except (RecursionError, TypeError, ValueError) as error:
            raise ValueError(f"the messages are no JSON: {error}; mend them") from error
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer

    def _compile(self) -> tuple[str, ...]:
        """Compile the template; return the special tokens that it reads."""
        today = str(self.today) if self.today else None
        about = {"source": self.source, "tokens": self.special_tokens, "today": today}
        answer = self._request("compile", about)
        if "invalid" in answer:
            raise TokenizerError(f"not a valid chat template: {answer['invalid']}")
        return tuple(answer["reads"])

    def _request(self, do: str, about: Mapping[str, Any]) -> dict[str, Any]:
        request = {"do": do, "name": self.digest, **about}
        answer = ask(request, needs="ms-data[chat]", error=SettingError)
        if "limit" in answer:
            raise TokenizerError(
                f"the chat template {answer['limit']}, so it was stopped; look at what it does, or "
                "take another one"
            )
        return answer


def _from_folder(folder: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Read the template and the special tokens of a tokenizer's folder."""
    path = folder / "tokenizer_config.json"
    config = _read_config(path) if path.exists() else {}
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files = {"default": folder / "chat_template.jinja", **files}
    legacy = folder / "chat_template.json"
    if files:
        templates = {name: _read_template(path) for name, path in files.items()}
    elif config.get("chat_template") is None and legacy.exists():
        # Processors wrote it before there was chat_template.jinja.
        templates = _named(_read_config(legacy).get("chat_template"))
    else:
        templates = _named(config.get("chat_template"))
    wanted = name or "default"
    if wanted not in templates:
        have = ", ".join(templates) or "none"
        raise ValueError(f"there is no template named {wanted!r}; there are: {have}")
    return templates[wanted], _special_tokens(config)


def _read_template(path: Path) -> str:
    return read_text(path, error=TokenizerError, limit_bytes=TEMPLATE_LIMIT_BYTES)


def _read_config(path: Path) -> dict[str, Any]:
    return read_json(path, dict[str, Any], error=TokenizerError)


def _is_text(value: Any) -> bool:
    """Return whether all text in a value can be encoded as Unicode, without lone surrogates."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer_config.json, such as `bos_token`, by name."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and all(isinstance(one, str) for one in value.values()):
        return value
    if value is None:
        return {}
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and {"name", "template"} <= set(one) for one in value
    ):
        raise ValueError("chat_template is neither text nor a list of `name` and `template`")
    return {str(one["name"]): str(one["template"]) for one in value}
