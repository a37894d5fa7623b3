"""Messages to text through a tokenizer's own chat template, and which part of it is learnt.

A template is a Jinja program that comes with a tokenizer. It runs in Jinja's immutable sandbox,
with the same settings, filters and globals that transformers gives it, so that the text is the
same (tests hold both against each other). What the assistant says is found

1. by the template's own marks, `{% generation %}` to `{% endgeneration %}`, where it has them;
2. otherwise by prefixes: the text up to an answer, with the prompt that asks for it, must begin
   the text with that answer, and this must begin the whole. Where a template rewrites what came
   earlier the proof fails, and the conversation is refused instead of being learnt wrongly.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from ms_data.errors import SettingError, TokenizerError
from ms_data.messages import Message

__all__ = ["ChatTemplate", "Rendered"]

# Two characters that Unicode keeps for no one, around what a template marks as generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_PROBE = "quartz"
# What a template's own expressions raise.
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


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
        today: the date that the template is told if it asks; None is the day it runs.

    Raises:
        SettingError: jinja2 is not installed.
        TokenizerError: the template is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, Any] | None = None,
        today: date | None = None,
    ) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self.today = today
        self._marking = self._probed = False
        self._template = self._compile()

    @classmethod
    def load(
        cls, path: str | Path, *, name: str | None = None, today: date | None = None
    ) -> "ChatTemplate":
        """Reads a template.

        Args:
            path: a tokenizer's folder, with `chat_template.jinja` or a `tokenizer_config.json`
                that holds the template; or a Jinja file.
            name: which template, where there are several; by default the one named `default`.
            today: see `ChatTemplate`.

        Raises:
            TokenizerError: there is none, or it cannot be read.
        """
        path = Path(path)
        try:
            if path.is_dir():
                source, tokens = _from_folder(path, name)
            else:
                source, tokens = path.read_text(encoding="utf-8"), {}
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"{path}: cannot be read as a chat template: {error}; give a tokenizer's folder "
                "with tokenizer_config.json or chat_template.jinja"
            ) from error
        try:
            return cls(source, special_tokens=tokens, today=today)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    def with_tokens_of(self, folder: Path | None) -> "ChatTemplate":
        """This template, told the special tokens it reads if it wasn't told any.

        Args:
            folder: the tokenizer's, with a `tokenizer_config.json` that names them.

        Raises:
            SettingError: it reads some, and no one says what they are.
            TokenizerError: tokenizer_config.json cannot be read.
        """
        from jinja2.meta import find_undeclared_variables

        template = self._template.environment.parse(self.source)
        asked = sorted(one for one in find_undeclared_variables(template) if one.endswith("_token"))
        if self.special_tokens or not asked:
            return self
        config = folder / "tokenizer_config.json" if folder else None
        if config is None or not config.exists():
            raise SettingError(
                f"the chat template reads {asked[0]}, which nothing tells it; give the folder of "
                "a tokenizer with tokenizer_config.json as the tokenizer or as the template"
            )
        try:
            known = _special_tokens(_read_config(config))
        except (OSError, ValueError) as error:
            raise TokenizerError(
                f"{config}: cannot be read: {error}; fetch the tokenizer's folder again"
            ) from error
        told = {name: known[name] for name in asked if name in known}
        return ChatTemplate(self.source, special_tokens=told, today=self.today)

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself says which part is the assistant's."""
        return "endgeneration" in self.source

    def files(self) -> dict[str, bytes]:
        """The files that `load` reads this template from, by name."""
        config = json.dumps(self.special_tokens, indent=2, sort_keys=True, ensure_ascii=False)
        return {
            "chat_template.jinja": self.source.encode(),
            "tokenizer_config.json": config.encode() + b"\n",
        }

    @property
    def asks_date(self) -> bool:
        """Whether the template prints the date."""
        return "strftime_now" in self.source

    @property
    def digest(self) -> str:
        """Hexadecimal xxh3-128 of all that its text depends on but the messages."""
        asks = str(self.today) if self.asks_date else ""
        told = json.dumps([self.source, self.special_tokens, asks], sort_keys=True)
        return xxhash.xxh3_128_hexdigest(told.encode())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str:
        """The text of some messages, as transformers' `apply_chat_template` gives it.

        Args:
            messages: at least one; None as a value is the same as no such key.
            tools: JSON schemas of functions.
            add_generation_prompt: end with what asks the assistant to speak.
            variables: further names that the template reads.

        Raises:
            ValueError: the template refuses the messages; says why.
        """
        return self._run(messages, tools, add_generation_prompt, variables, marking=False)

    def learnt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        first: int = 0,
    ) -> Rendered:
        """The text of a conversation and the spans of the assistant's messages.

        Args:
            messages: of any roles; those of the assistant are learnt unless their `weight` is 0.
            tools: JSON schemas of functions.
            first: messages before this one are not learnt.

        Raises:
            ValueError: the template refuses the messages, or it cannot be proved which part is
                the assistant's, or that part is empty.
        """
        if not self._probed:
            self._probe()
        turns = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
        wanted = [at for at in turns if at >= first and messages[at].get("weight", 1)]
        plain = [{key: one[key] for key in one if key != "weight"} for one in messages]
        text = self._run(plain, tools, False, {}, marking=False)
        if self.marks_answers:
            spans = self._marked(text, plain, tools, turns, wanted)
        else:
            spans = [self._proved(text, plain, tools, at) for at in wanted]
        spans = [(start, stop) for start, stop in spans if text[start:stop].strip()]
        if not spans:
            raise ValueError(
                "the template gives the assistant no text in this conversation, so nothing would "
                "be learnt; give it an answer of weight 1, or mend the template"
            )
        return Rendered(text, tuple(spans))

    def _probe(self) -> None:
        """Refuses a template that prints no answer where it should be learnt.

        Raises:
            ValueError: an answer's words are not in what would be learnt.
        """
        self._probed = True
        asked = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text, spans = self.learnt(asked)
        except ValueError:  # it wants other messages than these; what it is given is judged alone
            return
        if not any(_PROBE in text[start:stop] for start, stop in spans):
            self._probed = False
            raise ValueError(
                "the template gives the assistant no text of its own, so nothing would be learnt; "
                "mend the template, or mark the answers in it with {% generation %}"
            )

    def _marked(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        turns: Sequence[int],
        wanted: Sequence[int],
    ) -> list[tuple[int, int]]:
        marked = self._run(messages, tools, False, {}, marking=True)
        if marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
            raise ValueError(
                "the template changes what it marks with {% generation %}; put the marks around "
                "what is printed, not around what is assigned"
            )
        spans = _spans(marked)
        if list(wanted) == list(turns):
            return spans
        if len(spans) != len(turns):
            raise ValueError(
                f"the template marks {len(spans)} parts with {{% generation %}} for {len(turns)} "
                "messages of the assistant, so it cannot be said which part is which; mark each "
                "message once"
            )
        return [span for at, span in zip(turns, spans, strict=True) if at in wanted]

    def _proved(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        at: int,
    ) -> tuple[int, int]:
        """Where message `at` stands in `text`, if prefixes prove it."""
        remedy = (
            "mark the assistant's part in the template with {% generation %} and "
            "{% endgeneration %}, or keep only the last answer in the conversation"
        )
        if at == 0:
            raise ValueError("the conversation begins with the assistant; begin it with the user")
        before = self._run(messages[:at], tools, True, {}, marking=False)
        last = at == len(messages) - 1
        after = text if last else self._run(messages[: at + 1], tools, False, {}, marking=False)
        for name, prefix, whole in (("before", before, after), ("up to", after, text)):
            if not whole.startswith(prefix):
                raise ValueError(
                    f"which part is the assistant's cannot be proved: the text {name} message "
                    f"{at} is written otherwise when more follows; {remedy}"
                )
        stop = len(after)
        while stop > len(before) and after[stop - 1].isspace():
            stop -= 1
        return len(before), stop

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        *,
        marking: bool,
    ) -> str:
        from jinja2 import TemplateError

        if not messages:
            raise ValueError("a conversation without messages; give at least one")
        given = json.loads(json.dumps([*messages, list(tools) if tools else None]))
        if marking and (_OPEN in json.dumps(given, ensure_ascii=False)):
            raise ValueError(f"the text holds the noncharacter {_OPEN!r}; remove it")
        self._marking = marking
        try:
            text: str = self._template.render(
                messages=[_told(message) for message in given[:-1]],
                tools=given[-1],
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **variables},
            )
        except (TemplateError, *_FAILURES) as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        finally:
            self._marking = False
        return text

    def _compile(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise SettingError(
                "chat templates need jinja2; install it with `pip install ms-data[chat]`"
            ) from error
        from ms_data.generation_tag import generation_tag

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[generation_tag(self._mark), "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._now
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            raise TokenizerError(f"not a valid chat template: {error}") from error

    def _mark(self, text: str) -> str:
        return f"{_OPEN}{text}{_CLOSE}" if self._marking else text

    def _now(self, form: str) -> str:
        when = datetime.combine(self.today, time()) if self.today else datetime.now()
        return when.strftime(form)


def _spans(marked: str) -> list[tuple[int, int]]:
    """What stands between marks, in characters of the text without them."""
    spans, start, seen = [], 0, 0
    for at, letter in enumerate(marked):
        if letter == _OPEN:
            start = at - seen
        elif letter == _CLOSE:
            spans.append((start, at - seen))
        seen += letter in (_OPEN, _CLOSE)
    return spans


def _told(message: Message) -> Message:
    """A message as templates read it: no empty keys, thoughts under each of their names."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter, HTML's characters stay as they are."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _from_folder(folder: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Template and special tokens of a tokenizer's folder."""
    path = folder / "tokenizer_config.json"
    config = _read_config(path) if path.exists() else {}
    if (folder / "chat_template.jinja").exists():
        templates = {"default": (folder / "chat_template.jinja").read_text(encoding="utf-8")}
        for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    else:
        templates = _named(config.get("chat_template"))
    wanted = name or "default"
    if wanted not in templates:
        have = ", ".join(templates) or "none"
        raise ValueError(f"there is no template named {wanted!r}; there are: {have}")
    return templates[wanted], _special_tokens(config)


def _read_config(path: Path) -> dict[str, Any]:
    config = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("tokenizer_config.json is no JSON object")
    return config


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Such as `bos_token`, by name."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if value is None:
        return {}
    if not isinstance(value, list) or not all(
        isinstance(one, dict) and {"name", "template"} <= set(one) for one in value
    ):
        raise ValueError("chat_template is neither text nor a list of `name` and `template`")
    return {str(one["name"]): str(one["template"]) for one in value}
