"""Chat templates are untrusted: their time, memory and output are bounded."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ms_data import ChatTemplate
from ms_data.errors import TokenizerError

from .chat_templates import CHATML

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
_NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
_GROWING = "{% set ns = namespace(x=X, y=X) %}{% for i in range(60) %}BODY{% endfor %}"

SLOW = {
    "nested ranges": _NESTED.replace("BODY", _NESTED),
    "nested printing": _NESTED.replace("BODY", "x"),
    "power of a power": "{% set n = messages | length + 8 %}{{ n ** (n ** n) % 7 }}",
    "power at compile time": "{{ 10 ** (10 ** 9) % 7 }}",
    "macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}"
    "{% endif %}{% endmacro %}{{ f(60) }}",
    "lists that share": _GROWING.replace("X", "[1]").replace(
        "BODY", "{% set ns.x = [ns.x, ns.x] %}"
    )
    + "{{ ns.x }}",
    "lists compared": _GROWING.replace("X", "[1]").replace(
        "BODY", "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
    )
    + "{{ ns.x == ns.y }}",
    "long expression": "{{ " + "+".join(["1"] * 300_000) + " }}",
    "integers that square": "{% set ns = namespace(x=3) %}{% for i in range(9999) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
}
LARGE = {
    "format": "{{ '%2000000000d' % 1 }}",
    "format method": "{{ '{:2000000000d}'.format(1) }}",
    "format filter": "{{ '%2000000000d' | format(1) }}",
    "JSON indent": "{{ messages | tojson(indent=10**9) }}",
    "text times a number": "{{ 'a' * 10**10 }}",
    "list times a number": "{{ ([0] * 10**10) | length }}",
    "center": "{{ 'a' | center(2000000000) }}",
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "zfill": "{{ 'a'.zfill(2000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ 'a\nb' | indent(2000000000) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list | length }}",
    "slice": "{{ [1] | slice(10**9) | list | length }}",
    "bytes": "{{ (5).to_bytes(2000000000, 'little') | length }}",
    "replace": "{% set a = 'a' * 100000 %}{{ a.replace('a', a) | length }}",
    "doubling": _GROWING.replace("X", "'a'").replace("BODY", "{% set ns.x = ns.x ~ ns.x %}"),
    "lipsum": "{{ lipsum(n=10**7) }}",
    "printed": "{{ 'a' * 30000000 }}",
}
BROKEN = {
    "break outside a loop": ("{% break %}", "not a valid chat template: 'break' outside loop"),
    "deep expression": ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "recursion depth"),
    "deep blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "recursion depth"),
    "infinity": ("{{ 1e999 | round | int }}", "rejects the messages"),
    "rounded infinity": (
        "{{ (1e308 * (messages | length + 9)) | round | int }}",
        "rejects the messages: cannot convert float infinity",
    ),
    "loop without end": (
        "{% for m in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "rejects the messages: maximum recursion",
    ),
    "half a character": ("{{ '\\ud800' }}", "half a character"),
    "long number": ("{{ 10 ** 5000 }}", "Exceeds the limit"),
    "no such file": ("{% include 'x' %}", "rejects the messages: no loader"),
    "terminal escapes": ("{{ raise_exception('x\x1b[31m\n' * 9999) }}", r"x \[31m x \[31m"),
}


def _error(source: str) -> Exception:
    """Return the error that a template raises."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller checks the message
        ChatTemplate(source).render_for_training(MESSAGES)
    return caught.value


@pytest.mark.parametrize("name", SLOW)
def test_endless_templates_are_stopped(name: str) -> None:
    """A limit applies, the error is one line, and the caller continues."""
    error = _error(SLOW[name])
    assert isinstance(error, TokenizerError)
    limits = ("exceeds the CPU time limit", "too much memory")
    assert any(limit in str(error) for limit in (*limits, "produces too much text"))


@pytest.mark.parametrize("name", LARGE)
def test_templates_that_build_huge_values_are_stopped(name: str) -> None:
    """Operators, formats, filters, and methods of strings, lists and numbers."""
    error = _error(LARGE[name])
    assert isinstance(error, TokenizerError)
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", BROKEN)
def test_failing_templates_are_refused_in_one_short_line(name: str) -> None:
    """Includes builtin exceptions; terminal escapes are removed."""
    source, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as caught:
        ChatTemplate(source).render_for_training(MESSAGES)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_no_template_takes_200_mib() -> None:
    """Peak memory of a fresh process and its children, over every third template."""
    script = (
        "import re, resource\n"
        "from tests.test_template_limits import MESSAGES, LARGE\n"
        "from ms_data import ChatTemplate\n"
        # ru_maxrss is inherited from the parent process.
        "status = lambda: open('/proc/self/status').read()\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', status())[1])\n"
        "before = peak()\n"
        "for source in list(LARGE.values())[::3]:\n"
        "    try: ChatTemplate(source).render_for_training(MESSAGES)\n"
        "    except ValueError: pass\n"
        "growth = peak() - before\n"
        "print(growth, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    command = [sys.executable, "-c", script]
    package = Path(__file__).parents[1]  # so that `tests` is importable
    result = subprocess.run(command, cwd=package, capture_output=True, text=True, check=True)
    assert sum(map(int, result.stdout.split())) < 200 << 10


def test_rendering_works_after_a_stopped_template_and_in_threads_and_forks() -> None:
    """The sandbox process is restarted, and a forked caller starts a new one."""
    template = ChatTemplate(CHATML)
    text = template.render(MESSAGES)
    with pytest.raises(TokenizerError):
        ChatTemplate(LARGE["text times a number"]).render(MESSAGES)
    assert template.render(MESSAGES) == text
    rendered: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: rendered.extend(template.render(MESSAGES) for _ in range(20))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rendered == [text] * 80
    if (child := os.fork()) == 0:
        os._exit(0 if template.render(MESSAGES) == text else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(MESSAGES) == text


def test_many_templates_and_long_conversations_are_rendered() -> None:
    """More templates than the compile cache holds; a conversation of 2 MB and 400 messages."""
    templates = [ChatTemplate(f"{number}{{{{ messages[0].content }}}}") for number in range(40)]
    for number, template in enumerate(templates):
        assert template.render(MESSAGES) == f"{number}Why?"
    turn = [
        {"role": "user", "content": "é漢 " * 1200},
        {"role": "assistant", "content": "So. " * 9},
    ]
    rendered = ChatTemplate(CHATML).render_for_training(turn * 200)
    assert len(rendered.spans) == 200


def test_messages_that_json_cannot_represent_are_refused() -> None:
    """Cyclic lists, sets, lone surrogates."""
    template = ChatTemplate(CHATML)
    deep: list[object] = []
    deep.append(deep)
    for value in (deep, {1}, "\ud800"):
        with pytest.raises(ValueError, match=r"as JSON|half a character|rejects"):
            template.render([{"role": "user", "content": value}])


@pytest.mark.parametrize(
    ("source", "tokens"),
    [(None, None), (3.5, {}), (b"{{ 1 }}", None), ("{{ 1 }}", ["x", 3]), ("{{ 1 }}", "a")],
)
def test_arguments_of_the_wrong_type_give_one_line(source: object, tokens: object) -> None:
    with pytest.raises(TokenizerError, match="a chat template must be a string") as error:
        ChatTemplate(source, special_tokens=tokens)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
