"""Attacks on a sandbox, and a scene that shows their effect. A script, run as several users.

An attack is a program plus a check from outside that it succeeded. It runs with all protections,
where it must fail; with none, where it must succeed; and with each protection that stops it alone.
The script prints the outcome per attack and protection as JSON.
"""

import ctypes
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ms_align.rewards.sandbox.client import ZygoteClient
from ms_align.rewards.sandbox.inside.zygote import PROTECTIONS
from ms_align.rewards.sandbox.limits import Limits, Outcome
from ms_align.rewards.sandbox.run import run_in

LIMITS = Limits(wall_s=20.0, cpu_s=5, memory_mib=256)
SECRET = "a secret of the trainer"
IPC_KEY = 0x6D730000 | os.getpid() & 0xFFFF  # two runs at once share the kernel's tables

_VICTIM = f"""
import ctypes, sys
buffer = ctypes.create_string_buffer({SECRET!r}.encode())
print(ctypes.addressof(buffer), flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""

_PRELUDE = """
import ctypes, os, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    words = [ctypes.c_long(x) if isinstance(x, int) else x for x in arguments]
    result = libc.syscall(number, *words)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""

IS_X86 = platform.machine() == "x86_64"


class Scene:
    """Targets of attacks: a process, files, sockets and queues of the trainer's user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "kept"
        self.path.write_text(SECRET)
        os.utime(self.path, (1_000_000_000, 1_000_000_000))
        self.path.chmod(0o600)
        os.chmod(folder, 0o700)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(folder / "datagrams"))
        for endpoint in (self.listener, self.datagrams):
            endpoint.setblocking(False)
        self.before = set(folder.iterdir())
        self.victim = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _VICTIM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"WORD": SECRET},
            text=True,
        )
        assert self.victim.stdout is not None
        self.address = int(self.victim.stdout.readline())

    def fill(self, code: str) -> str:
        """Return the attack's program with the values of this scene."""
        for name, value in {
            "$PATH": str(self.path),
            "$FOLDER": str(self.folder),
            "$PID": str(self.victim.pid),
            "$ADDRESS": str(self.address),
            "$PORT": str(self.listener.getsockname()[1]),
            "$KEY": str(IPC_KEY),
            "$SECRET_BYTES": str(len(SECRET)),
        }.items():
            code = code.replace(name, value)
        return _PRELUDE + code

    def close(self) -> None:
        """Remove all targets."""
        self.victim.kill()
        with suppress(BrokenPipeError):  # a killed victim did not read the last question
            self.victim.communicate()
        self.listener.close()
        self.datagrams.close()
        if os.path.ismount(self.folder):
            subprocess.run(["umount", "-l", str(self.folder)], check=False)
        for remove, arguments in ((_libc.msgctl, ()), (_libc.shmctl, ()), (_libc.semctl, (0,))):
            get_function = {"msgctl": "msgget", "shmctl": "shmget", "semctl": "semget"}[
                remove.__name__
            ]
            identifier = _ipc(get_function)
            if identifier >= 0:
                remove(identifier, *arguments, 0, None)


_libc = ctypes.CDLL(None, use_errno=True)


def _ipc(function: str) -> int:
    """Return the id of a System V object that an attack would leave; negative if missing."""
    arguments = {"msgget": (0,), "shmget": (0, 0), "semget": (0, 0)}[function]
    return int(getattr(_libc, function)(IPC_KEY, *arguments))


SuccessCheck = Callable[[Scene, Outcome], bool]


class Attack(NamedTuple):
    """Program, test of its success, and the protections that stop it individually."""

    name: str
    code: str
    happened: SuccessCheck
    alone: str
    root_only: bool = False
    x86_only: bool = False
    may_be_closed: bool = False
    """The kernel may refuse it to everyone, so success without protections is not required."""


def printed_secret(scene: Scene, outcome: Outcome) -> bool:
    """Return whether the program printed text that only a successful attack knows."""
    return "ATTACKED" in outcome.output or SECRET in outcome.output


def victim_killed(scene: Scene, outcome: Outcome) -> bool:
    """Return whether the victim process is dead: a pending SIGKILL ends it before it answers."""
    assert scene.victim.stdin is not None
    assert scene.victim.stdout is not None
    with suppress(BrokenPipeError):
        scene.victim.stdin.write("alive?\n")
        scene.victim.stdin.flush()
    return not scene.victim.stdout.readline()


def content_changed(scene: Scene, outcome: Outcome) -> bool:
    """Return whether the file's content has changed."""
    return scene.path.read_text() != SECRET


def names_changed(scene: Scene, outcome: Outcome) -> bool:
    """Return whether the names in the folder have changed."""
    return set(scene.folder.iterdir()) != scene.before


def _status(scene: Scene) -> os.stat_result:
    return scene.path.stat()


def _accepted(scene: Scene, outcome: Outcome) -> bool:
    try:
        scene.listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def _received(scene: Scene, outcome: Outcome) -> bool:
    try:
        return bool(scene.datagrams.recv(16))
    except BlockingIOError:
        return False


def _lives_on(scene: Scene, outcome: Outcome) -> bool:
    """Return whether a process that the program started outlives it."""
    lines = [word for word in outcome.output.split() if word.startswith("CHILD=")]
    if not lines:
        return False
    child = int(lines[0].removeprefix("CHILD="))
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


ATTACKS = (
    # Signals.
    Attack("kill", "os.kill($PID, 9)", victim_killed, "seccomp namespaces"),
    Attack(
        "rt_sigqueueinfo",
        f"call({129 if IS_X86 else 138}, $PID, 9, struct.pack('iii116x', 9, 0, -1))",
        victim_killed,
        "seccomp namespaces",
    ),
    Attack(
        "rt_tgsigqueueinfo",
        f"call({297 if IS_X86 else 240}, $PID, $PID, 9, struct.pack('iii116x', 9, 0, -1))",
        victim_killed,
        "seccomp namespaces",
    ),
    Attack(
        "tgkill",
        f"call({234 if IS_X86 else 131}, $PID, $PID, 9)",
        victim_killed,
        "seccomp namespaces",
    ),
    Attack(
        "pidfd", "call(424, call(434, $PID, 0), 9, None, 0)", victim_killed, "seccomp namespaces"
    ),
    Attack(
        "descriptor owner",
        "import fcntl\nr, w = os.pipe()\n"
        "fcntl.fcntl(r, fcntl.F_SETOWN, $PID); fcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
        victim_killed,
        "seccomp namespaces",
    ),
    Attack(
        "descriptor owner by ioctl",
        "import fcntl\nr, w = os.pipe()\n"
        "fcntl.fcntl(r, 15, struct.pack('ii', 1, $PID)); fcntl.fcntl(r, 10, 9)\n"
        "fcntl.ioctl(r, 0x5452, struct.pack('i', 1)); os.write(w, b'x')",
        victim_killed,
        "seccomp namespaces",
    ),
    # Files.
    Attack("empty", "os.open('$PATH', os.O_TRUNC)", content_changed, "seccomp landlock namespaces"),
    Attack("open to write", "open('$PATH', 'w')", content_changed, "seccomp landlock namespaces"),
    Attack("truncate", "os.truncate('$PATH', 3)", content_changed, "seccomp landlock namespaces"),
    Attack(
        "map",
        "import mmap\nm = mmap.mmap(os.open('$PATH', os.O_RDWR), 4); m[0] = 0",
        content_changed,
        "seccomp landlock namespaces",
    ),
    Attack(
        "open by handle",
        "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 136)\n"
        "at = ctypes.c_int()\n"
        f"call({303 if IS_X86 else 264}, -100, b'$PATH', handle, ctypes.byref(at), 0)\n"
        f"call({304 if IS_X86 else 265}, os.open('$FOLDER', os.O_RDONLY), handle, 0o1001)",
        content_changed,
        "seccomp privileges",
        root_only=True,
    ),
    Attack(
        "mount over",
        f"call({165 if IS_X86 else 40}, b'none', b'$FOLDER', b'tmpfs', 0, None)",
        lambda scene, outcome: os.path.ismount(scene.folder),
        "seccomp namespaces privileges",
        root_only=True,
    ),
    Attack(
        "times",
        "os.utime('$PATH', (1, 1))",
        lambda scene, outcome: _status(scene).st_mtime != 1_000_000_000,
        "seccomp namespaces",
    ),
    Attack(
        "mode",
        "os.chmod('$PATH', 0o666)",
        lambda scene, outcome: _status(scene).st_mode & 0o777 != 0o600,
        "seccomp namespaces",
    ),
    Attack(
        "owner",
        "os.chown('$PATH', 12345, 12345)",
        lambda scene, outcome: _status(scene).st_uid == 12345,
        "seccomp namespaces privileges",
        root_only=True,
    ),
    Attack(
        "attribute",
        "os.setxattr('$PATH', 'user.attacked', b'1')",
        lambda scene, outcome: "user.attacked" in os.listxattr(scene.path),
        "seccomp namespaces",
        may_be_closed=True,
    ),
    Attack(
        "inode flags",
        "import fcntl\nfcntl.ioctl(os.open('$PATH', os.O_RDONLY), 0x40086602,\n"
        "    struct.pack('l', 0x40)); print('ATTACKED')",
        printed_secret,
        "seccomp landlock namespaces",
        may_be_closed=True,
    ),
    Attack("unlink", "os.unlink('$PATH')", names_changed, "seccomp landlock namespaces"),
    Attack("rename", "os.rename('$PATH', '$PATH.2')", names_changed, "seccomp landlock namespaces"),
    Attack("new folder", "os.mkdir('$FOLDER/2')", names_changed, "seccomp landlock namespaces"),
    Attack("symlink", "os.symlink('x', '$FOLDER/2')", names_changed, "seccomp landlock namespaces"),
    Attack("link", "os.link('$PATH', '$FOLDER/2')", names_changed, "seccomp landlock namespaces"),
    Attack("fifo", "os.mkfifo('$FOLDER/2')", names_changed, "seccomp landlock namespaces"),
    Attack(
        "lock",
        "import fcntl\nfcntl.flock(os.open('$PATH', os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('ATTACKED')",
        printed_secret,
        "seccomp landlock namespaces",
    ),
    Attack("read a file", "print(open('$PATH').read())", printed_secret, "landlock namespaces"),
    Attack(
        "list a folder",
        "print('ATTACKED' if 'kept' in os.listdir('$FOLDER') else '')",
        printed_secret,
        "landlock namespaces",
    ),
    # Other processes.
    Attack(
        "read memory",
        "buffer = ctypes.create_string_buffer($SECRET_BYTES)\n"
        "here = struct.pack('PN', ctypes.addressof(buffer), $SECRET_BYTES)\n"
        "there = struct.pack('PN', $ADDRESS, $SECRET_BYTES)\n"
        f"call({310 if IS_X86 else 270}, $PID, here, 1, there, 1, 0)\nprint(buffer.raw.decode())",
        printed_secret,
        "seccomp namespaces",
        may_be_closed=True,
    ),
    Attack(
        "write memory",
        "buffer = ctypes.create_string_buffer(b'x')\n"
        "here = struct.pack('PN', ctypes.addressof(buffer), 1)\n"
        "there = struct.pack('PN', $ADDRESS, 1)\n"
        f"call({311 if IS_X86 else 271}, $PID, here, 1, there, 1, 0)\nprint('ATTACKED')",
        printed_secret,
        "seccomp namespaces",
        may_be_closed=True,
    ),
    Attack(
        "read memory as a file",
        "f = open('/proc/$PID/mem', 'rb', 0); f.seek($ADDRESS)\n"
        "print(f.read($SECRET_BYTES).decode())",
        printed_secret,
        "landlock namespaces",
        may_be_closed=True,
    ),
    Attack(
        "read environment",
        "print(open('/proc/$PID/environ').read())",
        printed_secret,
        "landlock namespaces",
    ),
    Attack(
        "trace",
        f"call({101 if IS_X86 else 117}, 0x4206, $PID, 0, 0); print('ATTACKED')",
        printed_secret,
        "seccomp namespaces",
        may_be_closed=True,
    ),
    Attack(
        "take a descriptor",
        "call(438, call(434, $PID, 0), 1, 0); print('ATTACKED')",
        printed_secret,
        "seccomp namespaces",
        may_be_closed=True,
    ),
    Attack(
        "priority",
        "os.setpriority(os.PRIO_PROCESS, $PID, 5)",
        lambda scene, outcome: os.getpriority(os.PRIO_PROCESS, scene.victim.pid) == 5,
        "seccomp namespaces",
    ),
    Attack(
        "disk priority",
        f"call({251 if IS_X86 else 30}, 1, $PID, (3 << 13)); print('ATTACKED')",
        printed_secret,
        "seccomp namespaces",
    ),
    Attack(
        "cores",
        "os.sched_setaffinity($PID, {min(os.sched_getaffinity(0))}); print('ATTACKED')",
        printed_secret,
        "seccomp namespaces",
    ),
    Attack(
        "scheduler",
        "os.sched_setscheduler($PID, os.SCHED_BATCH, os.sched_param(0))",
        lambda scene, outcome: os.sched_getscheduler(scene.victim.pid) == os.SCHED_BATCH,
        "seccomp namespaces",
    ),
    Attack(
        "limits",
        "import resource\nresource.prlimit($PID, resource.RLIMIT_NOFILE, (9, 9))\n"
        "print('ATTACKED')",
        printed_secret,
        "seccomp namespaces",
    ),
    # Objects that outlive the program.
    Attack(
        "message queue",
        f"call({68 if IS_X86 else 186}, $KEY, 0o1600)",
        lambda scene, outcome: _ipc("msgget") >= 0,
        "seccomp namespaces",
    ),
    Attack(
        "shared memory",
        f"call({29 if IS_X86 else 194}, $KEY, 4096, 0o1600)",
        lambda scene, outcome: _ipc("shmget") >= 0,
        "seccomp namespaces",
    ),
    Attack(
        "semaphores",
        f"call({64 if IS_X86 else 190}, $KEY, 1, 0o1600)",
        lambda scene, outcome: _ipc("semget") >= 0,
        "seccomp namespaces",
    ),
    Attack(
        "key",
        f"call({248 if IS_X86 else 217}, b'user', b'ms-align-attack', b'x', 1, -4)\n"
        "print('ATTACKED')",
        printed_secret,
        "seccomp",
        may_be_closed=True,
    ),
    Attack(
        "child that lives on",
        "if os.fork() == 0:\n    os.setsid()\n    print(f'CHILD={os.getpid()}', flush=True)\n"
        "    [os.close(fd) for fd in range(16)]\n    import time; time.sleep(60)\n"
        "import time; time.sleep(0.5)",
        _lives_on,
        "seccomp",
    ),
    # Ways out of the process.
    Attack(
        "TCP",
        "socket.create_connection(('127.0.0.1', $PORT), 2)",
        _accepted,
        "seccomp namespaces",
    ),
    Attack(
        "datagram",
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '$FOLDER/datagrams')",
        _received,
        "seccomp namespaces",
    ),
    Attack(
        "datagram through a pair",
        "a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "a.sendto(b'x', '$FOLDER/datagrams')",
        _received,
        "seccomp namespaces",
    ),
    Attack(
        "program",
        "os.execv('/bin/echo', ['echo', 'ATTACKED'])",
        printed_secret,
        "seccomp landlock namespaces",
    ),
    Attack(
        "new user namespace",
        f"call({272 if IS_X86 else 97}, 0x10000000); print('ATTACKED')",
        printed_secret,
        "seccomp",
        may_be_closed=True,
    ),
    Attack(
        "host name",
        "name = socket.gethostname().encode()\n"
        f"call({170 if IS_X86 else 161}, name, len(name)); print('ATTACKED')",
        printed_secret,
        "seccomp privileges",
        root_only=True,
    ),
    Attack(
        "io_uring",
        "call(425, 1, ctypes.create_string_buffer(120)); print('ATTACKED')",
        printed_secret,
        "seccomp",
        may_be_closed=True,
    ),
    Attack(
        "32-bit call",
        "import mmap\n"
        "code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "code.write(bytes.fromhex('53b814000000cd805bc3'))\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(code))\n"
        "if ctypes.CFUNCTYPE(ctypes.c_int)(at)() > 0: print('ATTACKED')",
        printed_secret,
        "seccomp",
        x86_only=True,
        may_be_closed=True,
    ),
    Attack(
        "x32 call",
        "if call(0x40000000 + 39) > 0: print('ATTACKED')",
        printed_secret,
        "seccomp",
        x86_only=True,
        may_be_closed=True,
    ),
)


def attempt(attack: Attack, client: ZygoteClient) -> bool:
    """Return whether the attack succeeds against a sandbox with the client's protections."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("SCENE")) as folder:
        scene = Scene(Path(folder))
        try:
            outcome = run_in(client, {"program": scene.fill(attack.code)}, LIMITS)
            return attack.happened(scene, outcome)
        finally:
            scene.close()


def _interpreter() -> str:
    """Return an interpreter that this user may run; the current one may be in root's home."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if os.access(path, os.X_OK):
            return path
    sys.exit("this user may run no interpreter")


def main() -> None:
    """Run every attack with all protections, with none, and with each that should stop it."""
    if sys.argv[1:]:
        user = int(sys.argv[1])
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        sys.executable = _interpreter()
    clients = {"every": ZygoteClient(), "none": ZygoteClient(())}
    clients |= {protection: ZygoteClient((protection,)) for protection in PROTECTIONS}
    missing = {name: client.missing for name, client in clients.items()}
    results: dict[str, dict[str, bool]] = {}
    for attack in ATTACKS:
        if (attack.root_only and os.getuid() != 0) or (attack.x86_only and not IS_X86):
            continue
        names = ["every", "none", *attack.alone.split()]
        results[attack.name] = {name: attempt(attack, clients[name]) for name in names}
    for client in clients.values():
        client.stop()
    sys.stdout.write(json.dumps({"missing": missing, "results": results}))


if __name__ == "__main__":
    main()
