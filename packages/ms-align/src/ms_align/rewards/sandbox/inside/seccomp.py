"""Compiles the system call table to a seccomp filter program (seccomp(2))."""

import ctypes
import platform
import struct

from .kernel import MissingError, call, libc
from .syscalls import ALLOWED, ANSWERED_AS_MISSING, Call, Check

Instruction = tuple[int, int, int, int]
"""BPF instruction: opcode, jump if true, jump if false, operand."""

# BPF opcodes: load a 32-bit word, and, jump if equal, jump if at least, return.
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
# SECCOMP_RET_ALLOW, ERRNO with EPERM (1) and with ENOSYS (38), KILL_PROCESS.
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH of linux/audit.h
_X32 = 0x40000000
"""First number of the x32 ABI's system calls."""
_PR_SET_SECCOMP, _FILTER = 22, 2


def filter_program(machine: str) -> list[Instruction]:
    """Build the filter for `x86_64` or `aarch64`.

    System calls of another architecture kill the process. System calls outside the table fail
    with EPERM, which Python raises as an OSError.
    """
    if machine not in _ARCHITECTURES:
        raise MissingError(f"a system call table for {machine}")
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    for call_rule in ALLOWED:
        program += _match(
            call_rule, machine, [*_checked(call_rule.checks), (_RETURN, 0, 0, _ALLOW)]
        )
    for call_rule in ANSWERED_AS_MISSING:
        program += _match(call_rule, machine, [(_RETURN, 0, 0, _ENOSYS)])
    return [*program, (_RETURN, 0, 0, _EPERM)]


def _match(call_rule: Call, machine: str, instructions: list[Instruction]) -> list[Instruction]:
    number = call_rule.x86_64 if machine == "x86_64" else call_rule.aarch64
    return [] if number is None else [(_EQUAL, 0, len(instructions), number), *instructions]


def _checked(checks: tuple[Check, ...]) -> list[Instruction]:
    """Build instructions that reject the call unless all checks pass."""
    program: list[Instruction] = []
    for check in checks:
        low = 16 + 8 * check.argument  # seccomp_data.args
        # seccomp loads 32-bit words: the upper half of an argument is at `low + 4`.
        if check.upper_zero:
            program += [(_LOAD, 0, 0, low + 4), (_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _EPERM)]
        program += [(_LOAD, 0, 0, low), (_AND, 0, 0, check.mask)]
        remaining = len(check.values)
        for index, value in enumerate(check.values):
            # A match jumps over the remaining comparisons and the rejection.
            program.append((_EQUAL, remaining - index, 0, value))
        program.append((_RETURN, 0, 0, _EPERM))
    return program


def install() -> None:
    """Install the filter permanently. `no_new_privs` must be set first.

    Raises:
        MissingError: the kernel does not support seccomp filters.
    """
    code = b"".join(
        struct.pack("HBBI", *instruction) for instruction in filter_program(platform.machine())
    )
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: number of instructions, padding, pointer.
    header = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(instructions))
    program = ctypes.create_string_buffer(header, len(header))
    call("seccomp filters", libc().prctl, _PR_SET_SECCOMP, _FILTER, program, 0, 0)
