"""Drops privileges: user, capabilities and resource limits."""

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
    """Switch from root to the user `nobody`, if that can read the standard library."""
    if os.getuid() != 0:
        return
    drop_bounding_set()
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        os.listdir(os.path.dirname(os.__file__))
    except OSError:  # or a user namespace without nobody, whose root has no rights outside
        os.seteuid(0)
        return
    os.seteuid(0)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def drop_bounding_set() -> None:
    """Remove all capabilities that a program could gain by execve."""
    for capability in range(_CAPABILITIES):
        libc().prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def drop_capabilities() -> None:
    """Drop all capabilities, also from the bounding set."""
    drop_bounding_set()
    libc().prctl(_PR_CAP_AMBIENT, _CLEAR_AMBIENT, 0, 0, 0)
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)
    call("dropping capabilities", libc().capset, header, none)


def forbid_new() -> None:
    """Prevent descendants from gaining privileges, and other processes from reading this one."""
    call("no_new_privs", libc().prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def limit(cpu_s: int, memory_bytes: int, threads: int) -> None:
    """Set hard resource limits: no file writes, core dumps or message queues."""
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
    for name, value in limits.items():
        resource_id = getattr(resource, f"RLIMIT_{name}", None)
        if resource_id is None:  # not on this system
            continue
        hard = resource.getrlimit(resource_id)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(resource_id, (value, value))
