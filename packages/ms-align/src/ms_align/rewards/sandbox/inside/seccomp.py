"""Turns the table of system calls into a program of Linux's packet filter (seccomp(2))."""

import ctypes
import platform
import struct

from .kernel import MissingError, call, libc
from .syscalls import ALLOWED, ANSWERED_AS_MISSING, Call, Check

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
"""From here on x86-64 numbers its calls with 32-bit pointers."""
_PR_SET_SECCOMP, _FILTER = 22, 2


def filter_program(machine: str) -> list[Instruction]:
    """Build the filter for `x86_64` or `aarch64`.

    Another architecture's calls, which are numbered otherwise, kill the process; a call that is
    not in the table fails with EPERM, which Python raises as an OSError.
    """
    if machine not in _ARCHITECTURES:
        raise MissingError(f"a list of system calls for {machine}")
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for one in ALLOWED:
        program += _when(one, machine, [*_checked(one.checks), (_RETURN, 0, 0, _ALLOW)])
    for one in ANSWERED_AS_MISSING:
        program += _when(one, machine, [(_RETURN, 0, 0, _ENOSYS)])
    return [*program, (_RETURN, 0, 0, _EPERM)]


def _when(one: Call, machine: str, then: list[Instruction]) -> list[Instruction]:
    number = one.x86_64 if machine == "x86_64" else one.aarch64
    return [] if number is None else [(_EQUAL, 0, len(then), number), *then]


def _checked(checks: tuple[Check, ...]) -> list[Instruction]:
    """Write the instructions that refuse the call unless every check holds."""
    program: list[Instruction] = []
    for check in checks:
        low = 16 + 8 * check.argument
        if check.whole:
            program += [(_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM)]
        program += [(_LOAD, 0, 0, low), (_AND, 0, 0, check.mask)]
        left = len(check.values)
        for index, value in enumerate(check.values):
            program.append((_EQUAL, left - index, 0, value))
        program.append((_RETURN, 0, 0, _EPERM))
    return program


def install() -> None:
    """Put the filter on this process for good. `no_new_privs` must be set before.

    Raises:
        MissingError: the kernel takes no filter.
    """
    code = b"".join(struct.pack("HBBI", *one) for one in filter_program(platform.machine()))
    instructions = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    program = ctypes.create_string_buffer(head, len(head))
    call("seccomp filters", libc().prctl, _PR_SET_SECCOMP, _FILTER, program, 0, 0)
