# A copy of shared_source/chat/worker.py, made by `nox -s copies`; change it there.
"""Renders chat templates in a process of its own, under limits of time, memory and size.

A template is a program that came with somebody's model. Whatever it does (nested loops, huge
powers, wide formats, at compile time or later) is bounded by the operating system: processor time
by a timer that ends this process, memory by its address space. The file is run by its path and
imports nothing of its package, so that the process holds 20 MB and no more.

Requests and answers are JSON, each behind its length in eight bytes.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from typing import Any, BinaryIO

SECONDS = 0.5
SECONDS_A_BYTE = 1e-6
SECONDS_A_MESSAGE = 1e-3
"""Processor time of one request: so much, and so much for each byte and message it renders."""

MEMORY_BYTES = 128 << 20
MEMORY_BYTES_A_BYTE = 48
"""Memory of one request: so much, and so much for each byte of the request."""

TEXT_CHARACTERS = 4 << 20
TEXT_CHARACTERS_A_BYTE = 16
"""Longest text, likewise."""

KEPT_TEMPLATES = 32
MESSAGE_CHARACTERS = 300
PREFIX_BYTES = 8

# Two characters that Unicode keeps for no one, around what a template marks as generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_REMEDY = (
    "mark the assistant's part in the template with {% generation %} and {% endgeneration %}, or "
    "keep only the last answer in the conversation"
)


class RefusedError(Exception):
    """The messages cannot be rendered, or it cannot be said which part is the assistant's."""


class TooLongError(Exception):
    """The text is longer than any sound template's."""


class Worker:
    """Compiles templates, keeps them by name, and answers requests about them."""

    def __init__(self) -> None:
        self._templates: dict[str, Template] = {}

    def answer(self, request: Mapping[str, Any], size: int) -> dict[str, Any]:
        """Answer one request of `size` bytes."""
        if request["do"] == "compile":
            return self._compile(request["name"], request)
        template = self._templates.get(request["name"])
        if template is None:
            return {"unknown": True}
        template.size, template.seconds = size, SECONDS
        try:
            if request["do"] == "render":
                return {"text": template.render(request, request["messages"], request["prompt"])}
            text, spans = template.train(request)
            return {"text": text, "spans": spans}
        except (MemoryError, TooLongError):
            raise
        except RefusedError as error:
            return {"refused": one_line(error)}
        except Exception as error:  # a template's own expressions raise whatever they like
            return {"refused": f"the chat template refuses the messages: {one_line(error)}"}

    def _compile(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        while len(self._templates) >= KEPT_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        try:
            timed(SECONDS)
            template = Template(request["source"], request["tokens"], request["today"])
        except MemoryError:
            raise
        except Exception as error:  # Jinja compiles to Python, whose compiler has its own errors
            return {"invalid": one_line(error)}
        finally:
            timed(0)
        self._templates[name] = template
        return {"reads": template.reads}


class Template:
    """A compiled template with what it reads besides the messages."""

    def __init__(self, source: str, tokens: Mapping[str, Any], today: str | None) -> None:
        from jinja2.meta import find_undeclared_variables
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._tokens, self._today = tokens, today
        self._marking = False
        self.size, self.seconds = 0, SECONDS
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folded constants would be computed before any limit holds
            extensions=[generation_tag(self._mark), "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = self._now
        self._template = environment.from_string(source)
        self._marks = "endgeneration" in source
        names = find_undeclared_variables(environment.parse(source))
        self.reads = sorted(name for name in names if name.endswith("_token"))
        self._reads_parts: bool | None = None
        self._argument_form: str | None = None

    def render(
        self,
        request: Mapping[str, Any],
        messages: Sequence[dict[str, Any]],
        prompt: bool,
        marking: bool = False,
    ) -> str:
        """Render messages, with the generation prompt at the end if `prompt`."""
        self._marking = marking
        timed(self.seconds + SECONDS_A_BYTE * self.size + SECONDS_A_MESSAGE * len(messages))
        try:
            pieces = self._template.generate(
                messages=[self._as_read(message) for message in messages],
                tools=request["tools"],
                documents=None,
                add_generation_prompt=prompt,
                **{**self._tokens, **request["variables"]},
            )
            text = self._joined(pieces)
        finally:
            self.seconds = timed(0)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(
                "the text holds half a character (a lone surrogate), which no tokenizer reads; "
                "remove it"
            ) from error
        return text

    def _as_read(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the forms that this template prints as they are meant.

        1. Text parts become one text, joined by line ends, where the template prints a content
           that is a list as Python or JSON writes it, or not at all (Llama 3, Qwen 3).
        2. The arguments of a tool call become an object, or JSON text where the template takes
           them for text (DeepSeek V3).
        """
        message = as_read(message)
        content: Any = message.get("content")
        calls = message.get("tool_calls")
        if _all_text(content) and not self._takes_parts():
            message["content"] = "\n".join(part["text"] for part in content)
        if isinstance(calls, list) and calls:
            form = self._form_of_arguments()
            message["tool_calls"] = [_with_arguments(call, form) for call in calls]
        return message

    def _takes_parts(self) -> bool:
        """Find out, once, whether the template prints the text of a content that is a list."""
        if self._reads_parts is None:
            words = ("quartz", "violet", "saffron")
            parts = [{"type": "text", "text": word} for word in words]
            text = self._probe(
                {"role": "user", "content": parts[:2]}, {"role": "assistant", "content": parts[2:]}
            )
            printed = all(word in text for word in words)
            self._reads_parts = printed and "'type'" not in text and '"type"' not in text
        return self._reads_parts

    def _form_of_arguments(self) -> str:
        """Find out, once, whether the template takes arguments as an object or as text."""
        if self._argument_form is None:
            arguments = {"quartz": "violet"}
            self._argument_form = "object"
            shown = self._probe_call(arguments)
            if "quartz" not in shown or "{'quartz'" in shown:
                written = json.dumps(arguments)
                if written in self._probe_call(written):
                    self._argument_form = "text"
        return self._argument_form

    def _probe_call(self, arguments: object) -> str:
        function = {"name": "saffron", "arguments": arguments}
        call = {"type": "function", "id": "a1b2c3d4e", "function": function}
        asked = {"role": "user", "content": "Which?"}
        return self._probe(asked, {"role": "assistant", "content": "", "tool_calls": [call]})

    def _probe(self, *messages: dict[str, Any]) -> str:
        """Render messages of our own; empty where the template refuses them."""
        try:
            return str(
                self._template.render(
                    messages=list(messages),
                    tools=None,
                    documents=None,
                    add_generation_prompt=False,
                    **self._tokens,
                )
            )
        except MemoryError:
            raise
        except Exception:  # a template's own expressions raise whatever they like
            return ""

    def _joined(self, pieces: Iterable[str]) -> str:
        """Join the pieces of a text while it is made, so that its length is limited before time is.

        Raises:
            TooLongError: it is longer than any sound template's.
        """
        kept: list[str] = []
        room = TEXT_CHARACTERS + TEXT_CHARACTERS_A_BYTE * self.size
        for piece in pieces:
            room -= len(piece)
            if room < 0:
                raise TooLongError
            kept.append(piece)
        return "".join(kept)

    def train(self, request: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and find where its wanted answers stand."""
        text = self.render(request, request["messages"], False)
        if self._marks:
            return text, self._marked(text, request)
        return text, [self._proved(text, request, at) for at in request["wanted"]]

    def _marked(self, text: str, request: Mapping[str, Any]) -> list[tuple[int, int]]:
        if _OPEN in json.dumps([request["messages"], request["tools"]], ensure_ascii=False):
            raise RefusedError(f"the text holds the noncharacter {_OPEN!r}; remove it")
        marked = self.render(request, request["messages"], False, marking=True)
        if marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
            raise RefusedError(
                "the template changes what it marks with {% generation %}; put the marks around "
                "what is printed, not around what is assigned"
            )
        spans, turns, wanted = spans_of(marked), request["turns"], request["wanted"]
        if wanted == turns:
            return spans
        if len(spans) != len(turns):
            raise RefusedError(
                f"the template marks {len(spans)} parts with {{% generation %}} for {len(turns)} "
                "messages of the assistant, so it cannot be said which part is which; mark each "
                "message once"
            )
        return [span for at, span in zip(turns, spans, strict=True) if at in wanted]

    def _proved(self, text: str, request: Mapping[str, Any], at: int) -> tuple[int, int]:
        """Find where message `at` stands in `text`, if prefixes prove it."""
        if at == 0:
            raise RefusedError("the conversation begins with the assistant; begin it with the user")
        messages = request["messages"]
        before = self.render(request, messages[:at], True)
        last = at == len(messages) - 1
        after = text if last else self.render(request, messages[: at + 1], False)
        for name, prefix, whole in (("before", before, after), ("up to", after, text)):
            if not whole.startswith(prefix):
                raise RefusedError(
                    f"which part is the assistant's cannot be proved: the text {name} message "
                    f"{at} is written otherwise when more follows; {_REMEDY}"
                )
        stop = len(after)
        while stop > len(before) and after[stop - 1].isspace():
            stop -= 1
        return len(before), stop

    def _mark(self, text: str) -> str:
        return f"{_OPEN}{text}{_CLOSE}" if self._marking else text

    def _now(self, form: str) -> str:
        day = date.fromisoformat(self._today) if self._today else None
        return (datetime.combine(day, time()) if day else datetime.now()).strftime(form)


def generation_tag(mark: Any) -> Any:
    """Make an extension whose `{% generation %}` … `{% endgeneration %}` prints `mark(body)`."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

        def _print(self, caller: Any) -> str:
            return str(mark(str(caller())))

    return GenerationTag


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter does: unlike Jinja's, it keeps HTML's characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message: str) -> None:
    """Raise the error with which a template refuses the messages."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def as_read(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it: no empty keys, thoughts under all their names."""
    message = {key: value for key, value in message.items() if value is not None}
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _all_text(content: Any) -> bool:
    """Return whether a content is a list of parts that are all text."""
    return (
        isinstance(content, list)
        and bool(content)
        and all(
            isinstance(part, dict)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in content
        )
    )


def _with_arguments(call: Any, form: str) -> Any:
    """Return a tool call with its arguments as an object or as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    holder = function if isinstance(function, dict) else call
    if not isinstance(holder, dict) or "arguments" not in holder:
        return call
    arguments = holder["arguments"]
    if isinstance(arguments, str) and form == "object":
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    elif not isinstance(arguments, str) and form == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    holder = {**holder, "arguments": arguments}
    return {**call, "function": holder} if isinstance(function, dict) else holder


def spans_of(marked: str) -> list[tuple[int, int]]:
    """Find what stands between marks, in characters of the text without the marks."""
    spans, start = [], 0
    for seen, mark in enumerate(re.finditer(f"[{_OPEN}{_CLOSE}]", marked)):
        at = mark.start() - seen
        if mark[0] == _OPEN:
            start = at
        else:
            spans.append((start, at))
    return spans


def one_line(error: Exception) -> str:
    """Put an error's text on one line of printable characters, cut where it is long."""
    text = str(error)[: 4 * MESSAGE_CHARACTERS] or type(error).__name__
    line = " ".join("".join(one if one.isprintable() else " " for one in text).split())
    return line if len(line) <= MESSAGE_CHARACTERS else line[: MESSAGE_CHARACTERS - 3] + "..."


def timed(seconds: float) -> float:
    """End this process after so many more seconds of processor time; 0 lifts the limit.

    Returns:
        What was left of the time that was set before.
    """
    return signal.setitimer(signal.ITIMER_PROF, seconds)[0]


def limit_memory(size: int) -> None:
    """Limit the memory that one request of `size` bytes may take beyond what is taken now."""
    with open("/proc/self/statm", "rb") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    allowed = taken + MEMORY_BYTES + MEMORY_BYTES_A_BYTE * size
    resource.setrlimit(resource.RLIMIT_AS, (allowed, resource.getrlimit(resource.RLIMIT_AS)[1]))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    worker = Worker()
    while prefix := requests.read(PREFIX_BYTES):
        size = int.from_bytes(prefix, "little")
        try:
            limit_memory(size)
            answer = json.dumps(worker.answer(json.loads(requests.read(size)), size)).encode()
        except MemoryError:
            answer = b'{"limit": "takes too much memory"}'
        except TooLongError:
            answer = b'{"limit": "makes too long a text"}'
        except RecursionError:
            answer = b'{"refused": "the messages are nested too deeply; mend them"}'
        answers.write(len(answer).to_bytes(PREFIX_BYTES, "little") + answer)
        answers.flush()


def main() -> None:
    """Take away what a template could reach of the machine, then serve requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and closes the pipe
    sys.path[:] = json.loads(sys.argv[1])
    import pprint  # noqa: F401 - Jinja imports it when it is first asked for

    import jinja2.ext
    import jinja2.meta
    import jinja2.sandbox  # noqa: F401

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    serve(requests, answers)


if __name__ == "__main__":
    main()
