"""Gives up what a process may do by its user, its capabilities and its limits."""

import os
import resource
import struct

from .kernel import call, libc

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_SET_DUMPABLE = 24, 38, 47, 4
_CLEAR_AMBIENT = 4
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64
NOBODY = 65534


def drop_user() -> None:
    """Become nobody where this is root; stay where nobody may not read the standard library."""
    if os.getuid() != 0:
        return
    drop_bounding_set()
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        os.listdir(os.path.dirname(os.__file__))
    except OSError:  # or a user namespace that has no nobody, whose root is no root outside
        os.seteuid(0)
        return
    os.seteuid(0)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_bounding_set() -> None:
    """Take away every capability that a program could ever gain."""
    for capability in range(_CAPABILITIES):
        libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability, those that could be gained included."""
    drop_bounding_set()
    libc().prctl(_PR_CAP_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    head, nothing = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)
    call("dropping capabilities", libc().capset, head, nothing)


def forbid_new() -> None:
    """Forbid what is started to gain rights, and other processes of this user to read this one."""
    call("no_new_privs", libc().prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(cpu_s: int, memory_bytes: int, threads: int) -> None:
    """Take limits that cannot be raised again: no file grows, no core, no message queue."""
    limits = {
        "CPU": cpu_s,
        "AS": memory_bytes,
        "NPROC": threads,
        "FSIZE": 0,
        "CORE": 0,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "SIGPENDING": 64,
        "NOFILE": 64,
    }
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        if kind is None:  # not on this system
            continue
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
