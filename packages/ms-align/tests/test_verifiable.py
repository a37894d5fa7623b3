"""Verifiable rewards, and programs within their limits."""

import os
import socket
from pathlib import Path

import pytest

from ms_align import Sample
from ms_align.errors import RewardError
from ms_align.rewards.sandbox import Limits, judge, run_python
from ms_align.rewards.verifiable import ExactMatch, Numeric, PythonParses, PythonTests, last_number

QUICK = Limits(wall_s=10.0, cpu_s=1, memory_mib=256)


def sample(response: str, answer: str | None = None, **extra: object) -> Sample:
    """Return a sample with a response."""
    return Sample(
        prompt="",
        response=response,
        prompt_tokens=(),
        response_tokens=(),
        answer=answer,
        extra=extra,
    )


def test_exact_match_and_numbers() -> None:
    """Whitespace and case as configured; the last number in any notation."""
    assert ExactMatch()([sample(" 12\n", "12"), sample("12.", "12")]) == [1.0, 0.0]
    assert ExactMatch(fold_case=True, otherwise=-1.0)([sample("Yes", "yes")]) == [1.0]
    samples = [
        sample("so 1 + 1 = 2", "2"),
        sample("it is 1,234.5", "1234.50"),
        sample("3/4", "0.75"),
        sample("-2e3", "-2000"),
        sample("none", "2"),
        sample("2 or 3", "2"),
    ]
    assert Numeric()(samples) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert last_number("1/0") is None
    with pytest.raises(RewardError, match="sample 0 has no answer"):
        ExactMatch()([sample("x")])
    with pytest.raises(RewardError, match="contains no number"):
        Numeric()([sample("1", "one")])


def test_python_parses_rewards_valid_python() -> None:
    """Empty responses do not count; code is extracted from its fence."""
    samples = [
        sample("x = 1"),
        sample(""),
        sample("def"),
        sample("Sure:\n```python\ny = 2\n```\nok"),
    ]
    assert PythonParses()(samples) == [1.0, 0.0, 0.0, 1.0]


def test_python_tests_rewards_code_that_passes() -> None:
    """In parallel; wrong code, a syntax error and an early exit do not pass."""
    tests = "assert double(4) == 8"
    samples = [
        sample("def double(x): return 2 * x", tests=tests),
        sample("def double(x): return x", tests=tests),
        sample("def double(x) return", tests=tests),
        sample("import sys; sys.exit(0)", tests=tests),
        sample("import os; os._exit(0)", answer=tests),
    ]
    assert PythonTests(limits=QUICK)(samples) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("while True: pass", "timeout"),
        ("import time; time.sleep(60)", "timeout"),
        ("x = bytearray(1 << 30)", "memory"),
        ("raise ValueError", "failed"),
    ],
)
def test_time_and_memory_are_limited(program: str, reason: str) -> None:
    """CPU time, wall-clock time and address space."""
    outcome = run_python(program, Limits(wall_s=3.0, cpu_s=1, memory_mib=256))
    assert (outcome.passed, outcome.reason) == (False, reason)


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        "import os; os.fork()",
        "import subprocess; subprocess.run(['/bin/true'])",
        "open({path!r}, 'w')",
        "open({path!r}, 'a').write('x')",
        "import os; os.open({path!r}, os.O_TRUNC)",
        "import os; os.unlink({path!r})",
        "import os; os.rename({path!r}, {path!r} + '2')",
        "import os; os.mkdir({path!r} + '3')",
        "import os; os.kill({pid}, 0)",
        "import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99))",
        "import ctypes; assert ctypes.CDLL(None).syscall(435, 0, 0) == 0",
    ],
)
def test_a_program_cannot_reach_the_machine(attempt: str, tmp_path: Path) -> None:
    """No network, process, file or signal; the file is unchanged."""
    path = tmp_path / "file"
    path.write_text("content")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = attempt.format(port=port, path=str(path), pid=os.getpid())
        outcome = run_python(program, QUICK)
    assert not outcome.passed
    assert outcome.confined
    assert "Error" in outcome.output
    assert path.read_text() == "content"
    assert list(tmp_path.iterdir()) == [path]


WELL_BEHAVED = {
    "plain values": (
        "def f(a, b): return tuple(set(a) & set(b))",
        "assert set(f((3, 4, 5), (5, 4, 10))) == {4, 5} and isinstance(f((), ()), tuple)",
    ),
    "a checker that takes the function": (
        "def f(x: int) -> bool: return x > 0",
        "def check(candidate):\n    assert candidate(1) is True\ncheck(f)",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n"
        "    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)",
        "s = Stack()\ns.push((1, 2))\nassert len(s) == 1 and s.items == [(1, 2)]",
    ),
    "objects that are linked": (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
        "def last(n):\n    while n.next is not None: n = n.next\n    return n",
        "a = Node(1); a.next = Node(2)\nassert last(a).v == 2",
    ),
    "a list changed in place": (
        "def turn(m): m[:] = [list(row) for row in zip(*m[::-1])]",
        "m = [[1, 2], [3, 4]]\nassert turn(m) is None\nassert m == [[3, 1], [4, 2]]",
    ),
    "a generator": ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
    "functions as values": (
        "def each(f, xs): return [f(x) for x in xs]\ndef twice(f): return lambda x: f(f(x))",
        "assert each(lambda x: x + 1, [1]) == [2] and twice(lambda x: x * 3)(2) == 18",
    ),
    "errors": (
        "class Bad(ValueError): pass\ndef f(): raise Bad('no')",
        "for kind in (Bad, ValueError):\n    try:\n        f()\n        assert False\n"
        "    except kind as error:\n        assert 'no' in str(error)",
    ),
    "large and odd values": (
        "import datetime, decimal\ndef f(x): return x",
        "import datetime, decimal\n"
        "for x in (7 ** 3000, 1.5, 2j, b'\\0', range(3), {(1,): {2}}, decimal.Decimal('1.10'),\n"
        "          datetime.date(2020, 1, 2), '\\ud800', None, frozenset({1}), -(2 ** 53)):\n"
        "    assert f(x) == x and type(f(x)) is type(x), x",
    ),
    "modules that the response imported": (
        "import math\ndef f(): return math.pi",
        "assert math.isclose(f(), 3.141592653589793)",
    ),
    "asyncio and threads": (
        "import asyncio\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "async def g(x):\n    await asyncio.sleep(0.01)\n    return x\n"
        "def f():\n    with ThreadPoolExecutor(2) as pool:\n"
        "        return [asyncio.run(g(1)), *pool.map(abs, [-2])]",
        "assert f() == [1, 2]",
    ),
}


@pytest.mark.parametrize("name", WELL_BEHAVED)
def test_correct_responses_pass_their_tests(name: str) -> None:
    """Tests are written as for a single process, and wrong responses fail."""
    response, tests = WELL_BEHAVED[name]
    outcome = judge(response, tests, QUICK)
    assert outcome.passed, outcome.output
    assert not judge(response, f"{tests}\nassert False", QUICK).passed
    assert not judge("", tests, QUICK).passed


def test_objects_of_the_response_are_not_compared() -> None:
    """The response's own operators would decide; the message says what to do instead."""
    response = "class V:\n    def __init__(self, x): self.x = x"
    for test in ("V(1) == V(1)", "V(1)", "3 in [V(1)]", "not V(1)", "V(1) != 3"):
        outcome = judge(response, f"assert {test}", QUICK)
        assert not outcome.passed
        assert "compare, add or test its plain values" in outcome.output
    assert judge(response, "assert V(1).x == V(1).x", QUICK).passed


def test_threads_and_reading_are_allowed() -> None:
    """Legitimate programs use them."""
    program = (
        "import threading, json\n"
        "seen = []\n"
        "t = threading.Thread(target=seen.append, args=(1,)); t.start(); t.join()\n"
        "assert seen == [1] and json.loads('[1]') == [1]\n"
    )
    assert run_python(program, QUICK).passed
