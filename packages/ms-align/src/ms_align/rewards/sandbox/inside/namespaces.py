"""Enters namespaces that hide the machine's processes, network and files, except a few paths."""

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
_NEW_ROOT = "/proc"
"""Mount point of the new root: a folder that every system has and that holds no libraries."""


def enter(readable: Sequence[str]) -> None:
    """Enter new namespaces whose root has only `readable`, mounted read-only.

    Returns in a child process, the first in its PID namespace, so the kernel kills all other
    processes with it. The calling process waits for the child and exits.

    Raises:
        MissingError: the kernel or the container runtime does not allow namespaces.
    """
    user, group = os.getuid(), os.getgid()
    # Without root, mounting needs a user namespace in which this user is mapped.
    if user != 0 or libc().unshare(_MOUNT) != 0:
        call("namespaces", libc().unshare, _USER | _MOUNT)
        _write_own("setgroups", "deny")
        _write_own("uid_map", f"{user} {user} 1")
        _write_own("gid_map", f"{group} {group} 1")
    _build_root(readable)
    call("namespaces", libc().unshare, _OTHERS)
    child = os.fork()
    if child:
        # A copy of the control socket here would keep it open after the child has exited.
        os.closerange(3, 1 << 16)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def own_user() -> bool:
    """Enter another user namespace, with its own thread count; return False if that fails."""
    return int(libc().unshare(_USER)) == 0


def _write_own(name: str, text: str) -> None:
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)


def _build_root(readable: Sequence[str]) -> None:
    mount = libc().mount
    call("mounts", mount, b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    call("mounts", mount, b"sandbox", _NEW_ROOT.encode(), b"tmpfs", 0, b"size=1m,mode=755")
    for path in readable:
        target = _NEW_ROOT + path
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
    _make_read_only(_NEW_ROOT)
    os.chdir(_NEW_ROOT)
    # pivot_root(".", ".") stacks the old root on the new one, where it can be detached.
    call("mounts", libc().pivot_root, b".", b".")
    call("mounts", libc().umount2, b".", _DETACH)
    os.chdir("/")


def _make_read_only(target: str) -> None:
    # A user namespace may not remove the existing flags of a mount.
    existing = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
    flags = _REMOUNT | _BIND | _READ_ONLY | existing
    call("mounts", libc().mount, None, target.encode(), None, flags, None)
