"""What the interpreter of an unread program does before that program: take limits for good.

The filter is a program of Linux's packet filter over each system call (seccomp(2)). It kills no
one: a call that is shut off fails with EPERM, which Python raises as an OSError.
"""

import platform
import sys

__all__ = ["LAUNCHER", "confinement"]

# Numbers of system calls: (x86-64, arm64), None where there is no such call.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "ptrace": (101, 117),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "chroot": (161, 51),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "creat": (85, None),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "rmdir": (84, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "prlimit64": (302, 261),
}
_MISSING = {"clone3": (435, 435), "openat2": (437, 437)}
"""Answered as if the kernel had none, so that libraries take the older call, which is checked."""

_OPEN: tuple[tuple[str, int | None, int | None, int], ...] = (
    ("open", 2, None, 1),
    ("openat", 257, 56, 2),
)
"""Calls that open files, and which argument holds the flags."""

_CLONE = (56, 220)
_ARCHES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_CLONE_THREAD = 0x10000
_WRITING = {0: 0o1 | 0o2 | 0o100 | 0o1000, 1: 0o1 | 0o2 | 0o100 | 0o1000}
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC."""

_LOAD, _EQUAL, _ALL_SET, _ANY_SET, _RETURN = 0x20, 0x15, 0x45, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, operand."""


def confinement() -> list[Instruction] | None:
    """The filter for this machine; None where it has none."""
    if sys.platform != "linux" or platform.machine() not in _ARCHES:
        return None
    column, arch = _ARCHES[platform.machine()]
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),  # the call's architecture: another one numbers calls otherwise
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # its number
    ]
    if column == 0:  # x32 calls, numbered from 0x40000000, are shut off whole
        program += [(0x35, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for numbers in _CALLS.values():
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    for missing in _MISSING.values():
        program += [(_EQUAL, 0, 1, missing[column]), (_RETURN, 0, 0, _ENOSYS)]
    for _, x86, arm, argument in _OPEN:
        number = (x86, arm)[column]
        if number is not None:
            program += [
                (_EQUAL, 0, 4, number),
                (_LOAD, 0, 0, 16 + 8 * argument),
                (_ANY_SET, 0, 1, _WRITING[column]),
                (_RETURN, 0, 0, _EPERM),
                (_RETURN, 0, 0, _ALLOW),
            ]
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, 16),
        (_ALL_SET, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _EPERM),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return program


LAUNCHER = f"""
import resource, struct, sys
word, cpu_s, memory, confined = sys.stdin.readline().split()
program = sys.stdin.read()
def confine():
    import ctypes
    code = b"".join(struct.pack("HBBI", *one) for one in {confinement()!r})
    buffer = ctypes.create_string_buffer(code)
    head = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.create_string_buffer(head), 0, 0):
        sys.exit("the kernel takes no filter")
for kind, most in (
    (resource.RLIMIT_CPU, int(cpu_s)), (resource.RLIMIT_AS, int(memory)),
    (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
):
    resource.setrlimit(kind, (most, most))
if confined == "1":
    confine()
def run(program, word):
    exec(compile(program, "<program>", "exec"), {{"__name__": "__main__"}})
    print(word, flush=True)
words, programs = [word], [program]
sys.stdin.close()
del word, program
run(programs.pop(), words.pop())
"""
