"""Namespaces: the sandbox sees no process, network or file of the machine but those it is given."""

import os
import signal
from collections.abc import Sequence

from .kernel import call, libc

_USER, _MOUNT, _PROCESS = 0x10000000, 0x00020000, 0x20000000
_NETWORK, _IPC, _HOST_NAME = 0x40000000, 0x08000000, 0x04000000
_OTHERS = _PROCESS | _NETWORK | _IPC | _HOST_NAME
_READ_ONLY, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 32, 4096, 16384, 1 << 18
_DETACH = 2
_PR_SET_PDEATHSIG = 1
_PLACE = "/proc"
"""Where the new root is built: a folder that every system has, and none keeps its libraries in."""


def enter(readable: Sequence[str]) -> None:
    """Go on in namespaces of its own, with a root that holds `readable`, read-only, alone.

    Returns in a process that is the first of its process namespace: the kernel ends all others
    with it. The process that called waits for it and ends.

    Raises:
        MissingError: the kernel, or what runs this container, allows no namespaces.
    """
    user, group = os.getuid(), os.getgid()
    if user != 0 or libc().unshare(_MOUNT) != 0:
        call("namespaces", libc().unshare, _USER | _MOUNT)
        _map_to_itself("setgroups", "deny")
        _map_to_itself("uid_map", f"{user} {user} 1")
        _map_to_itself("gid_map", f"{group} {group} 1")
    _build_root(readable)
    call("namespaces", libc().unshare, _OTHERS)
    first = os.fork()
    if first:
        # Another descriptor of the control socket would keep it open after the first process.
        os.closerange(3, 1 << 16)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def own_user() -> bool:
    """Enter one more user namespace, in which this process alone is counted; False where none."""
    return int(libc().unshare(_USER)) == 0


def _map_to_itself(name: str, text: str) -> None:
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)


def _build_root(readable: Sequence[str]) -> None:
    mount = libc().mount
    call("mounts", mount, b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    call("mounts", mount, b"sandbox", _PLACE.encode(), b"tmpfs", 0, b"size=1m,mode=755")
    for path in readable:
        target = _PLACE + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(os.readlink(path), target)
            continue
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "x"):
                pass
        call("mounts", mount, path.encode(), target.encode(), None, _BIND | _RECURSIVE, None)
        _make_read_only(target)
    _make_read_only(_PLACE)
    os.chdir(_PLACE)
    call("mounts", libc().pivot_root, b".", b".")
    call("mounts", libc().umount2, b".", _DETACH)
    os.chdir("/")


def _make_read_only(target: str) -> None:
    # Flags that a mount has already may not be taken away in a user namespace, so they are kept.
    kept = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    flags = _REMOUNT | _BIND | _READ_ONLY | kept
    call("mounts", libc().mount, None, target.encode(), None, flags, None)
