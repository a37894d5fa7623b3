"""Chat-template renderer: a subprocess with limits on time, memory and output size.

A template is an untrusted program that ships with a model. The operating system bounds its cost
(nested loops, huge powers, wide formats, while compiling or rendering): a timer kills this process
at its CPU-time limit, and RLIMIT_AS limits its memory. The file is run by path and does not import
its package, which keeps the process at 20 MB.

Requests and answers are JSON with an 8-byte little-endian length prefix.
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
SECONDS_PER_BYTE = 1e-6
SECONDS_PER_MESSAGE = 1e-3
"""CPU time limit of a request: base, per byte of the request, and per rendered message."""

MEMORY_BYTES = 128 << 20
MEMORY_BYTES_PER_BYTE = 48
"""Memory limit of a request: base, and per byte of the request."""

TEXT_CHARACTERS = 4 << 20
TEXT_CHARACTERS_PER_BYTE = 16
"""Output limit of a request: base, and per byte of the request."""

CACHED_TEMPLATES = 32
MESSAGE_CHARACTERS = 300
PREFIX_BYTES = 8

# Unicode noncharacters, printed around the parts that a template marks as generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_REMEDY = (
    "mark the assistant's part in the template with {% generation %} and {% endgeneration %}, or "
    "keep only the last assistant message of the conversation"
)


class RefusedError(Exception):
    """The messages cannot be rendered, or the assistant's part cannot be located."""


class TooLongError(Exception):
    """The rendered text exceeds the output limit."""


class Worker:
    """Compiles templates, caches them by name, and answers requests."""

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
        except Exception as error:  # expressions in a template can raise any exception
            return {"refused": f"the chat template rejects the messages: {one_line(error)}"}

    def _compile(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        while len(self._templates) >= CACHED_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        try:
            timed(SECONDS)
            template = Template(request["source"], request["tokens"], request["today"])
        except MemoryError:
            raise
        except Exception as error:  # Jinja compiles to Python, so SyntaxError and others too
            return {"invalid": one_line(error)}
        finally:
            timed(0)
        self._templates[name] = template
        return {"reads": template.reads}


class Template:
    """A compiled template and the variables it uses besides the messages."""

    def __init__(self, source: str, tokens: Mapping[str, Any], today: str | None) -> None:
        from jinja2.meta import find_undeclared_variables
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._tokens, self._today = tokens, today
        self._marking = False
        self.size, self.seconds = 0, SECONDS
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would run before any limit is set
            extensions=[generation_tag(self._mark), "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = self._strftime_now
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
        """Render messages; `prompt` adds the generation prompt, `marking` the span marks."""
        self._marking = marking
        timed(self.seconds + SECONDS_PER_BYTE * self.size + SECONDS_PER_MESSAGE * len(messages))
        try:
            pieces = self._template.generate(
                messages=[self._normalized(message) for message in messages],
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
                "the text contains a lone surrogate (half a character), which cannot be tokenized; "
                "remove it"
            ) from error
        return text

    def _normalized(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message converted to the forms that this template renders correctly.

        1. Text parts are joined by newlines into one string if the template prints a list as its
           Python or JSON representation, or not at all (Llama 3, Qwen 3).
        2. Tool-call arguments become an object, or JSON text if the template concatenates them as
           a string (DeepSeek V3).
        """
        message = normalized(message)
        content: Any = message.get("content")
        calls = message.get("tool_calls")
        if _all_text(content) and not self._takes_parts():
            message["content"] = "\n".join(part["text"] for part in content)
        if isinstance(calls, list) and calls:
            form = self._form_of_arguments()
            message["tool_calls"] = [_with_arguments(call, form) for call in calls]
        return message

    def _takes_parts(self) -> bool:
        """Probe once whether the template renders the text parts of list content."""
        if self._reads_parts is None:
            words = ("quartz", "violet", "saffron")
            parts = [{"type": "text", "text": word} for word in words]
            text = self._probe(
                {"role": "user", "content": parts[:2]}, {"role": "assistant", "content": parts[2:]}
            )
            all_printed = all(word in text for word in words)
            self._reads_parts = all_printed and "'type'" not in text and '"type"' not in text
        return self._reads_parts

    def _form_of_arguments(self) -> str:
        """Probe once whether the template expects arguments as an object or as text."""
        if self._argument_form is None:
            arguments = {"quartz": "violet"}
            self._argument_form = "object"
            rendered = self._probe_call(arguments)
            if "quartz" not in rendered or "{'quartz'" in rendered:
                encoded = json.dumps(arguments)
                if encoded in self._probe_call(encoded):
                    self._argument_form = "text"
        return self._argument_form

    def _probe_call(self, arguments: object) -> str:
        function = {"name": "saffron", "arguments": arguments}
        call = {"type": "function", "id": "a1b2c3d4e", "function": function}
        question = {"role": "user", "content": "Which?"}
        return self._probe(question, {"role": "assistant", "content": "", "tool_calls": [call]})

    def _probe(self, *messages: dict[str, Any]) -> str:
        """Render probe messages; empty if the template rejects them."""
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
        except Exception:  # expressions in a template can raise any exception
            return ""

    def _joined(self, pieces: Iterable[str]) -> str:
        """Join the pieces of a text, checking its length while they are rendered.

        Raises:
            TooLongError: the text exceeds the output limit.
        """
        rendered: list[str] = []
        remaining = TEXT_CHARACTERS + TEXT_CHARACTERS_PER_BYTE * self.size
        for piece in pieces:
            remaining -= len(piece)
            if remaining < 0:
                raise TooLongError
            rendered.append(piece)
        return "".join(rendered)

    def train(self, request: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation and locate the requested answers as (start, stop) spans."""
        text = self.render(request, request["messages"], False)
        if self._marks:
            return text, self._locate_marked(text, request)
        return text, [self._locate(text, request, index) for index in request["wanted"]]

    def _locate_marked(self, text: str, request: Mapping[str, Any]) -> list[tuple[int, int]]:
        if _OPEN in json.dumps([request["messages"], request["tools"]], ensure_ascii=False):
            raise RefusedError(f"the text contains the noncharacter {_OPEN!r}; remove it")
        marked = self.render(request, request["messages"], False, marking=True)
        if marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
            raise RefusedError(
                "the template modifies text marked with {% generation %} before printing it; mark "
                "the expression that prints the text, not an assignment"
            )
        spans, turns, targets = spans_of(marked), request["turns"], request["wanted"]
        if targets == turns:
            return spans
        if len(spans) != len(turns):
            raise RefusedError(
                f"the template marks {len(spans)} parts with {{% generation %}} for {len(turns)} "
                "assistant messages, so parts cannot be matched to messages; mark each message once"
            )
        return [span for index, span in zip(turns, spans, strict=True) if index in targets]

    def _locate(self, text: str, request: Mapping[str, Any], index: int) -> tuple[int, int]:
        """Locate message `index` in `text`; refuse if the rendered prefixes do not match."""
        if index == 0:
            raise RefusedError(
                "the conversation starts with an assistant message; start it with a user message"
            )
        messages = request["messages"]
        start_prefix = self.render(request, messages[:index], True)
        is_last = index == len(messages) - 1
        stop_prefix = text if is_last else self.render(request, messages[: index + 1], False)
        for name, prefix, full in (
            ("before", start_prefix, stop_prefix),
            ("up to", stop_prefix, text),
        ):
            if not full.startswith(prefix):
                raise RefusedError(
                    f"cannot locate the assistant's part: the text {name} message {index} changes "
                    f"when later messages are rendered; {_REMEDY}"
                )
        stop = len(stop_prefix)
        while stop > len(start_prefix) and stop_prefix[stop - 1].isspace():
            stop -= 1
        return len(start_prefix), stop

    def _mark(self, text: str) -> str:
        return f"{_OPEN}{text}{_CLOSE}" if self._marking else text

    def _strftime_now(self, form: str) -> str:
        day = date.fromisoformat(self._today) if self._today else None
        return (datetime.combine(day, time()) if day else datetime.now()).strftime(form)


def generation_tag(mark: Any) -> Any:
    """Build an extension whose `{% generation %}` … `{% endgeneration %}` prints `mark(body)`."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 - as declared by Jinja

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
    """Encode JSON like the filter of transformers, which does not escape HTML as Jinja's does."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def refuse(message: str) -> None:
    """Raise a TemplateError: the `raise_exception` that templates call."""
    from jinja2 import TemplateError

    raise TemplateError(message)


def normalized(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without null values, and with its reasoning under the usual names."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _all_text(content: Any) -> bool:
    """Return True if message content is a non-empty list of text parts."""
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
    """Return a tool call with its arguments converted to an object or to JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    target = function if isinstance(function, dict) else call
    if not isinstance(target, dict) or "arguments" not in target:
        return call
    arguments = target["arguments"]
    if isinstance(arguments, str) and form == "object":
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
    elif not isinstance(arguments, str) and form == "text":
        arguments = json.dumps(arguments, ensure_ascii=False)
    target = {**target, "arguments": arguments}
    return {**call, "function": target} if isinstance(function, dict) else target


def spans_of(marked: str) -> list[tuple[int, int]]:
    """Return the spans between marks, as offsets in the text without the marks."""
    spans, start = [], 0
    for marks_before, mark in enumerate(re.finditer(f"[{_OPEN}{_CLOSE}]", marked)):
        offset = mark.start() - marks_before
        if mark[0] == _OPEN:
            start = offset
        else:
            spans.append((start, offset))
    return spans


def one_line(error: Exception) -> str:
    """Format an error as one line of printable characters, truncated if it is long."""
    text = str(error)[: 4 * MESSAGE_CHARACTERS] or type(error).__name__
    line = " ".join(
        "".join(character if character.isprintable() else " " for character in text).split()
    )
    return line if len(line) <= MESSAGE_CHARACTERS else line[: MESSAGE_CHARACTERS - 3] + "..."


def timed(seconds: float) -> float:
    """Kill this process after `seconds` more of CPU time; 0 cancels the timer.

    Returns:
        Remaining seconds of the previous timer.
    """
    return signal.setitimer(signal.ITIMER_PROF, seconds)[0]


def limit_memory(size: int) -> None:
    """Limit the memory of a request of `size` bytes, on top of the current usage."""
    with open("/proc/self/statm", "rb") as file:
        used_bytes = int(file.read().split()[0]) * resource.getpagesize()
    limit_bytes = used_bytes + MEMORY_BYTES + MEMORY_BYTES_PER_BYTE * size
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the input ends."""
    worker = Worker()
    while prefix := requests.read(PREFIX_BYTES):
        size = int.from_bytes(prefix, "little")
        try:
            limit_memory(size)
            answer = json.dumps(worker.answer(json.loads(requests.read(size)), size)).encode()
        except MemoryError:
            answer = b'{"limit": "takes too much memory"}'
        except TooLongError:
            answer = b'{"limit": "produces too much text"}'
        except RecursionError:
            answer = b'{"refused": "the messages are nested too deeply; flatten them"}'
        answers.write(len(answer).to_bytes(PREFIX_BYTES, "little") + answer)
        answers.flush()


def main() -> None:
    """Block file writes and core dumps, then serve requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent also receives it and closes the pipe
    sys.path[:] = json.loads(sys.argv[1])
    import pprint  # noqa: F401 - Jinja imports it lazily

    import jinja2.ext
    import jinja2.meta
    import jinja2.sandbox  # noqa: F401

    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    serve(requests, answers)


if __name__ == "__main__":
    main()
