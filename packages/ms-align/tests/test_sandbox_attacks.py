"""The sandbox: attacks, resource limits, and the integrity of the verdict."""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ms_align.errors import ConfigError
from ms_align.rewards.sandbox import Limits, judge, run_python
from ms_align.rewards.sandbox.client import ZygoteClient, zygote
from ms_align.rewards.sandbox.inside.seccomp import filter_program
from ms_align.rewards.sandbox.inside.syscalls import ALLOWED, ANSWERED_AS_MISSING
from ms_align.rewards.sandbox.run import run_in

from .sandbox_attacks import ATTACKS, Attack

USERS = {"as_it_is": "", "nobody": "65534"}
QUICK = Limits(wall_s=10.0, cpu_s=2, memory_mib=256)


@pytest.fixture(scope="module", params=USERS)
def attack_results(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of all attacks, run by this user and, as root, also by nobody."""
    if request.param == "nobody" and os.getuid() != 0:
        pytest.skip("only root can become nobody; the other half runs as this user")
    script = str(Path(__file__).parent / "sandbox_attacks.py")
    arguments = [argument for argument in [USERS[request.param]] if argument]
    run = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False
    )
    if "may run no interpreter" in run.stderr:
        pytest.skip("nobody may run no interpreter on this machine")
    assert run.returncode == 0, run.stderr
    results: dict[str, Any] = json.loads(run.stdout)
    return results


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.name for attack in ATTACKS])
def test_an_attack_fails_with_each_protection_and_succeeds_without(
    attack: Attack, attack_results: dict[str, Any]
) -> None:
    """It fails with all protections and with each that should stop it.

    Success without any protection proves that it is a real attack.
    """
    results = attack_results["results"].get(attack.name)
    if results is None:
        pytest.skip("not for this user or machine")
    assert not results.pop("every")
    if not results.pop("none"):
        assert attack.may_be_closed, "without protections the attack must succeed"
    for protection, succeeded in results.items():
        assert attack_results["missing"][protection] or not succeeded, protection


def test_every_available_protection_is_active() -> None:
    """Missing ones are listed."""
    client = zygote()
    assert len(client.active) + len(client.missing) == 4
    assert {"seccomp", "privileges"} <= client.active


FORGERIES = {
    "write the verdict": "import os\nos.write(4, b'passed'); os._exit(0)",
    "write every descriptor": (
        "import os\n"
        "for one in range(64):\n"
        "    try: os.write(one, b'passed')\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "leave": "import sys; sys.exit(0)",
    "leave at once": "import os; os._exit(0)",
    "call the writer by frames": (
        "import sys, os\nf = sys._getframe()\nwhile f.f_back: f = f.f_back\n"
        "g = sys._getframe(1).f_globals\nos.write(g['END'], g['PASSED']); os._exit(0)"
    ),
    "equal to everything": (
        "class Equal:\n    def __eq__(self, other): return True\n    __ne__ = lambda s, o: False\n"
        "    __hash__ = object.__hash__\ndef double(x): return Equal()"
    ),
    "an int equal to everything": (
        "class Equal(int):\n    def __eq__(self, other): return True\n"
        "    __hash__ = int.__hash__\ndef double(x): return Equal()"
    ),
    "difference of nothing": (
        "class Near(float):\n    def __sub__(self, other): return 0.0\n    __rsub__ = __sub__\n"
        "    def __eq__(self, other): return True\ndef double(x): return Near()"
    ),
    "no assertion": "import builtins\nbuiltins.AssertionError = type('A', (), {})",
    "own abs": "def abs(x): return 0\ndef double(x): return 0",
    "own builtins": "import builtins\nbuiltins.abs = lambda x: 0\ndef double(x): return 0",
    "trace": (
        "import sys, os\ndef t(f, e, a): os._exit(0)\nsys.settrace(t)\ndef double(x): return x"
    ),
    "speak for the wire": (
        "import os\nfor one in range(3, 12):\n"
        "    try: os.write(one, b'[\"value\", null]\\n' * 9)\n    except OSError: pass"
    ),
    "name Python's names": (
        "import gc\n"
        "for peer in [o for o in gc.get_objects() if type(o).__name__ == 'Peer']:\n"
        "    peer._on_names = lambda wanted: {'double': 0, '__builtins__': {}, 'abs': 0,\n"
        "        'AssertionError': SystemExit, 'exec': 0}\n"
    ),
    "call the tests' own": (
        "import gc\n"
        "def double(x):\n"
        "    peer = [o for o in gc.get_objects() if type(o).__name__ == 'Peer'][0]\n"
        "    try: peer.ask('read', 0, '__globals__')\n    except Exception: pass\n"
        "    return peer.ask('names', ['abs'])"
    ),
    "exit by an exception": "def double(x): raise SystemExit(0)",
    "deep": "def double(x):\n    r = []\n    for _ in range(10**5): r = [r]\n    return r",
    "nan": "def double(x): return float('nan')",
    "true": "def double(x): return True",
}
TESTS = "assert double(4) == 8\nassert abs(double(5) - 10) < 1e-6\nassert double('a') == 'aa'"


@pytest.mark.parametrize("name", FORGERIES)
def test_responses_cannot_fake_the_verdict(name: str) -> None:
    """The verdict comes from a process that runs none of the response's code."""
    assert not judge(FORGERIES[name], TESTS, QUICK).passed


@pytest.mark.parametrize("name", ["write the verdict", "write every descriptor", "own abs"])
def test_responses_can_fake_a_verdict_if_run_with_the_tests(name: str) -> None:
    """Run as one program, the same responses report a pass; hence `judge`."""
    tests = "assert abs(double(5) - 10) < 1e-6"
    assert run_python(f"{FORGERIES[name]}\n{tests}", QUICK).passed
    assert not judge(FORGERIES[name], tests, QUICK).passed


def test_expected_values_are_not_in_the_judged_process() -> None:
    """Objects, frames and descriptors are searched; as one program the search succeeds."""
    search = (
        "import gc, os, re, sys\n"
        "def answer():\n"
        "    types = (str, dict, list, tuple)\n"
        "    texts = [str(o) for o in gc.get_objects() if isinstance(o, types)]\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        texts += [str(frame.f_locals), str(frame.f_code.co_consts)]\n"
        "        frame = frame.f_back\n"
        "    for fd in range(3, 64):\n"
        "        try: texts.append(os.pread(fd, 1 << 20, 0).decode(errors='replace'))\n"
        "        except OSError: pass\n"
        "    words = {w for text in texts for w in re.findall('[a-z]{13}', text)}\n"
        "    return [w for w in words if w[::-1] == 'eulavdetcepxe']\n"
    )
    tests = "answers = answer()\nassert answers == ['expectedvalue'], answers"
    assert run_python(f"{search}{tests}", QUICK).passed
    outcome = judge(search, tests, QUICK)
    assert outcome.reason == "failed"
    assert "AssertionError: []" in outcome.output


def test_a_response_cannot_access_the_verdict_descriptor() -> None:
    """It has only its output and the two pipes of its tests."""
    response = (
        "import os\n"
        "def open_fds():\n"
        "    fds = []\n"
        "    for fd in range(64):\n"
        "        try: os.fstat(fd); fds.append(fd)\n"
        "        except OSError: pass\n"
        "    return fds\n"
    )
    tests = "fds = open_fds()\nassert fds == [0, 1, 2, 4, 5], fds"
    outcome = judge(response, tests, QUICK)
    assert outcome.passed, outcome.output


ENDLESS = {
    "busy": "while True: pass",
    "in C": "10 ** 10 ** 9",
    "asleep": "import time; time.sleep(99)",
    "printing": "while True: print('x' * 9999)",
    "printing from threads": (
        "import threading, os\n"
        "def flood():\n    while True: os.write(1, b'x' * 65536)\n"
        "for _ in range(4): t = threading.Thread(target=flood); t.start()\nt.join()"
    ),
    "threads alone": (
        "import threading\ndef spin():\n    while True: pass\n"
        "for _ in range(4): t = threading.Thread(target=spin); t.start()\nt.join()"
    ),
    "leader gone": (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,)).start()\n"
        f"ctypes.CDLL(None).syscall({60 if os.uname().machine == 'x86_64' else 93}, 0)"
    ),
    "deaf": (
        "import signal, time\n"
        "for one in set(signal.Signals) - {9, 19}: signal.signal(one, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(99)"
    ),
    "without descriptors": "import os, time\nos.closerange(0, 64); time.sleep(99)",
    "half a message": "import os, time\nos.write(4, b'pass'); os.write(5, b'[1'); time.sleep(99)",
    "at its end": "import atexit, time\natexit.register(time.sleep, 99)\ntime.sleep(99)",
}


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("location", ["program", "response", "call"])
def test_a_program_that_never_ends_is_stopped(name: str, location: str) -> None:
    """Even if it is far from its CPU limit."""
    limits = Limits(wall_s=0.8, cpu_s=60, memory_mib=256)
    program = ENDLESS[name]
    body = "".join(f"    {line}\n" for line in program.splitlines())
    if location == "program":
        assert not run_python(program, limits).passed
    elif location == "response":
        judge(program, "assert True", limits)
    else:
        judge(f"def f():\n{body}", "f()", limits)


@pytest.mark.parametrize("protections", [(), ("namespaces",)])
def test_stopped_and_orphaned_processes_end_with_the_run(protections: tuple[str, ...]) -> None:
    """Even without seccomp, where a program can fork and stop itself."""
    client = ZygoteClient(protections)
    process_name = f"orphan-{os.getpid()}-{len(protections)}"
    program = (
        "import ctypes, os, signal\n"
        f"name = {process_name.encode()[:15]!r}\n"
        "if os.fork() == 0: ctypes.CDLL(None).prctl(15, name); signal.pause()\n"
        "os.kill(os.getpid(), signal.SIGSTOP)"
    )
    seen_running: list[bool] = []
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.02) and not seen_running:
            if is_running(process_name[:15]):
                seen_running.append(True)

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert run_in(client, {"program": program}, Limits(wall_s=1.0)).reason == "timeout"
    finished.set()
    watcher.join()
    assert seen_running, "the orphan never ran"
    assert exits_soon(process_name[:15])
    client.stop()


def exits_soon(name: str) -> bool:
    """Return whether no process has this name after a while."""
    for _ in range(100):
        if not is_running(name):
            return True
        time.sleep(0.02)
    return False


def is_running(name: str) -> bool:
    """Return whether a process with this name runs in any namespace."""
    for process_folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            text = (process_folder / "stat").read_text()
            if f"({name})" in text and text.rpartition(")")[2].split()[0] not in "ZX":
                return True
    return False


def test_output_is_capped_and_the_trainer_does_not_grow() -> None:
    """A flood of output ends the program, and only its tail is stored."""
    run_python("pass")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flood = "import os\nwhile True: os.write(2, b'y' * (1 << 20))"
    outcome = run_python(flood, Limits(wall_s=10.0))
    assert outcome.reason == "output"
    assert len(outcome.output) <= 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10
    assert run_python("print('x' * 100_000)", Limits(output_kib=200)).passed
    assert run_python("print('x' * 300_000)", Limits(output_kib=200)).reason == "output"
    many = "import os\nfor _ in range(48): os.write(1, b'x' * (1 << 20))"
    assert len(run_python(many, Limits(wall_s=30.0, output_kib=1 << 17)).output) <= 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10


@pytest.mark.parametrize(
    "program",
    [
        "x = bytearray(1 << 30)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "import mmap\nx = mmap.mmap(-1, 1 << 30)",
        "def f():\n    x = []\n    while True: x.append('y' * (1 << 20))\n    return x\nf()",
    ],
)
def test_memory_is_limited(program: str) -> None:
    """The address space, for every way to allocate."""
    assert not run_python(program, QUICK).passed
    assert not judge(f"def g():\n    exec({program!r})", "g()", QUICK).passed


def test_large_answers_cannot_exhaust_the_tests() -> None:
    """A response can neither fill the tests' memory nor delay them beyond the limit."""
    for body in ("'x' * (100 << 20)", "10 ** 10 ** 7", "list(range(10 ** 7))"):
        limits = Limits(wall_s=3.0, cpu_s=3, memory_mib=256)
        assert not judge(f"def f(): return {body}", "assert f() == 1", limits).passed


def test_threads_are_bounded_and_do_not_starve_another_program() -> None:
    """A program that starts threads endlessly is limited; a concurrent one is not affected."""
    many = (
        "import threading, time\nstarted = 0\ntry:\n"
        "    for started in range(500):\n"
        "        threading.Thread(target=time.sleep, args=(1.5,), daemon=True).start()\n"
        "except RuntimeError: pass\n"
        "print(started)\ntime.sleep(1)\nassert started < 100"
    )
    limits = Limits(wall_s=10.0, memory_mib=4096)
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(run_python(many, limits)))
    thread.start()
    time.sleep(0.5)
    other_program = "import threading\nt = threading.Thread(target=print); t.start(); t.join()"
    assert run_python(other_program, QUICK).passed
    thread.join()
    assert outcomes[0].passed, outcomes[0].output


def test_no_process_or_descriptor_is_left() -> None:
    """After passes, failures, floods and timeouts the trainer has the same descriptors."""
    run_python("pass")
    open_before = len(os.listdir("/proc/self/fd"))
    for program in ("pass", "1 / 0", "while True: print('x' * 999)", "import time; time.sleep(9)"):
        run_python(program, Limits(wall_s=0.3))
        judge(program, "assert True", Limits(wall_s=0.3))
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert run_python("import os\nassert os.getpid() > 1", QUICK).passed


def test_a_dead_zygote_is_restarted() -> None:
    """The next run is judged, however the zygote died."""
    client = zygote()
    client._process.kill()
    client._process.wait()
    assert run_python("pass").passed
    assert zygote() is not client


def test_a_sandbox_that_fails_twice_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message includes the system error."""

    def raise_error(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("ms_align.rewards.sandbox.run.run_in", raise_error)
    with pytest.raises(ConfigError, match=r"failed twice: .*Too many open files"):
        run_python("pass")


def test_missing_protections_are_an_error_unless_unconfined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line names them; `unconfined` runs with the remaining ones and reports it."""
    client = ZygoteClient(("landlock",))
    client.missing.append("seccomp filters (Operation not permitted)")
    monkeypatch.setattr("ms_align.rewards.sandbox.run.zygote", lambda: client)
    with pytest.raises(ConfigError, match=r"lacks seccomp filters .* set unconfined") as error:
        run_python("pass")
    assert "\n" not in str(error.value)
    outcome = run_python("pass", Limits(unconfined=True))
    assert (outcome.passed, outcome.confined) == (True, False)
    client.stop()


@pytest.mark.parametrize(
    ("machine", "header"),
    [
        ("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
        ("aarch64", "/usr/include/asm-generic/unistd.h"),
    ],
)
def test_system_call_numbers_match_the_kernel_headers(machine: str, header: str) -> None:
    """Every number in the table, per architecture."""
    if not Path(header).exists():
        pytest.skip(f"no {header} on this machine")
    defined = {}
    for line in Path(header).read_text().splitlines():
        words = line.replace("__NR3264_", "__NR_").split()
        if len(words) >= 3 and words[0] == "#define" and words[2].isdecimal():
            defined[words[1].removeprefix("__NR_")] = int(words[2])
    defined.setdefault("newfstatat", defined.get("fstatat", -1))
    for call in (*ALLOWED, *ANSWERED_AS_MISSING):
        assert defined.get(call.name) == getattr(call, machine), call.name


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_allows_exactly_its_table(machine: str) -> None:
    """The filter program is interpreted here for every call and condition."""
    program = filter_program(machine)
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    listed = {getattr(call, machine): call for call in ALLOWED}
    missing = {getattr(call, machine) for call in ANSWERED_AS_MISSING}
    for number in range(600):
        arguments = [0] * 6
        if number in listed:
            for check in listed[number].checks:
                arguments[check.argument] = check.values[0]
            expected = allow
        else:
            expected = 0x00050026 if number in missing else refuse
        assert _filtered(program, number, architecture, arguments) == expected
        for check in listed[number].checks if number in listed else ():
            for bit in range(64 if check.upper_zero else 32):
                changed = list(arguments)
                changed[check.argument] ^= 1 << bit
                compared_bits = check.mask | (0xFFFFFFFF << 32 if check.upper_zero else 0)
                is_allowed = (changed[check.argument] & compared_bits) in check.values
                decision = _filtered(program, number, architecture, changed)
                assert decision == (allow if is_allowed else refuse), (number, check, bit)
        assert _filtered(program, number, 0x40000003, arguments) == kill
    if machine == "x86_64":
        assert _filtered(program, 0x40000000, architecture, [0] * 6) == kill


def _filtered(
    program: list[tuple[int, int, int, int]], number: int, architecture: int, arguments: list[int]
) -> int:
    """Return the kernel's decision for a call, by interpreting the filter."""
    words = {0: number, 4: architecture}
    for index, value in enumerate(arguments):
        words[16 + 8 * index], words[20 + 8 * index] = value & 0xFFFFFFFF, value >> 32
    pc = accumulator = 0
    while True:
        code, jump_true, jump_false, operand = program[pc]
        pc += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            accumulator = words[operand]
        elif code == 0x54:
            accumulator &= operand
        else:
            pc += (
                jump_true
                if (accumulator == operand if code == 0x15 else accumulator >= operand)
                else jump_false
            )
