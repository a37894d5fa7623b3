"""Table of the system calls that a sandboxed program may make; all others fail.

Numbers are for Linux on x86-64 and arm64; None if the architecture does not have the call.
"""

from typing import NamedTuple

ALL_BITS = 0xFFFFFFFF


class Check(NamedTuple):
    """Condition on an argument: its bits under `mask` must be in `values`."""

    argument: int
    values: tuple[int, ...]
    mask: int = ALL_BITS
    upper_zero: bool = False
    """Also require the upper 32 bits to be 0, for pointers, which the kernel reads in full."""


class Call(NamedTuple):
    """System call: its numbers, why Python programs need it, and conditions on its arguments."""

    name: str
    x86_64: int | None
    aarch64: int | None
    reason: str
    checks: tuple[Check, ...] = ()


# O_CLOEXEC, O_DIRECTORY and O_NOFOLLOW of both architectures, O_LARGEFILE, O_NONBLOCK, O_NOCTTY:
# the flags that neither write, create, truncate nor change times.
_READ_FLAGS = 0o2000000 | 0o200000 | 0o400000 | 0o40000 | 0o100000 | 0o4000 | 0o400
_READS = ALL_BITS ^ _READ_FLAGS
_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC = 0, 1, 2, 3, 1030
_TCGETS, _TIOCGWINSZ, _FIONREAD, _FIONBIO = 0x5401, 0x5413, 0x541B, 0x5421
_FIONCLEX, _FIOCLEX = 0x5450, 0x5451
_PR_SET_NAME, _PR_GET_NAME = 15, 16
_THREAD = 0x3D0F00
"""Flags of pthread_create: everything is shared, with no new process and no new namespace."""
_CLONE_DETACHED = 0x400000  # musl adds it; the kernel ignores it
_AF_UNIX, _SOCK_STREAM = 1, 1
_SOCKET_FLAGS = 0o2004000  # SOCK_CLOEXEC, SOCK_NONBLOCK

_FILES, _OWN_FILES = "import modules and read files", "use its open descriptors"
_MEMORY, _TIME, _THREADS = "allocate memory", "read clocks and sleep", "threads and locks"
_WAIT, _WHO, _SIGNAL = "wait for its own descriptors (asyncio)", "query its ids", "signal handlers"
_PAIR = "asyncio wakes its loop through a socket pair within the process"

# Excludes owners, signals, leases, locks, seals and pipe sizes of descriptors.
_OWN_FLAGS = (Check(1, (_F_DUPFD, _F_GETFD, _F_SETFD, _F_GETFL, _F_DUPFD_CLOEXEC)),)
# Terminal queries, the number of readable bytes, and flags of the descriptor.
_OWN_STATE = (Check(1, (_TCGETS, _TIOCGWINSZ, _FIONREAD, _FIONBIO, _FIONCLEX, _FIOCLEX)),)
# Stream sockets only: a datagram socket pair could send to other sockets by address.
_STREAM = (Check(0, (_AF_UNIX,)), Check(1, (_SOCK_STREAM,), ALL_BITS ^ _SOCKET_FLAGS))
# Reading the process's own limits, without setting any.
_NO_NEW_LIMIT = (Check(0, (0,)), Check(2, (0,), upper_zero=True))

ALLOWED: tuple[Call, ...] = (
    Call("open", 2, None, _FILES, (Check(1, (0,), _READS),)),
    Call("openat", 257, 56, _FILES, (Check(2, (0,), _READS),)),
    Call("stat", 4, None, _FILES),
    Call("lstat", 6, None, _FILES),
    Call("newfstatat", 262, 79, _FILES),
    Call("statx", 332, 291, _FILES),
    Call("access", 21, None, _FILES),
    Call("faccessat", 269, 48, _FILES),
    Call("faccessat2", 439, 439, _FILES),
    Call("readlink", 89, None, _FILES),
    Call("readlinkat", 267, 78, _FILES),
    Call("getdents64", 217, 61, _FILES),
    Call("getcwd", 79, 17, _FILES),
    Call("read", 0, 63, _OWN_FILES),
    Call("readv", 19, 65, _OWN_FILES),
    Call("pread64", 17, 67, _OWN_FILES),
    Call("write", 1, 64, _OWN_FILES),
    Call("writev", 20, 66, _OWN_FILES),
    Call("lseek", 8, 62, _OWN_FILES),
    Call("fstat", 5, 80, _OWN_FILES),
    Call("close", 3, 57, _OWN_FILES),
    Call("dup", 32, 23, _OWN_FILES),
    Call("dup2", 33, None, _OWN_FILES),
    Call("dup3", 292, 24, _OWN_FILES),
    Call("pipe2", 293, 59, _OWN_FILES),
    Call("fcntl", 72, 25, _OWN_FILES, _OWN_FLAGS),
    Call("ioctl", 16, 29, _OWN_FILES, _OWN_STATE),
    Call("mmap", 9, 222, _MEMORY),  # files are open for reading only, so no mapping writes to one
    Call("munmap", 11, 215, _MEMORY),
    Call("mprotect", 10, 226, _MEMORY),
    Call("mremap", 25, 216, _MEMORY),
    Call("madvise", 28, 233, _MEMORY),
    Call("brk", 12, 214, _MEMORY),
    Call("clock_gettime", 228, 113, _TIME),
    Call("clock_getres", 229, 114, _TIME),
    Call("clock_nanosleep", 230, 115, _TIME),
    Call("nanosleep", 35, 101, _TIME),
    Call("gettimeofday", 96, 169, _TIME),
    Call("time", 201, None, _TIME),
    Call("times", 100, 153, _TIME),
    Call("getrusage", 98, 165, _TIME),
    Call("clone", 56, 220, _THREADS, (Check(0, (_THREAD,), ALL_BITS ^ _CLONE_DETACHED),)),
    Call("futex", 202, 98, _THREADS),
    Call("set_robust_list", 273, 99, _THREADS),
    Call("rseq", 334, 293, _THREADS),
    Call("sched_yield", 24, 124, _THREADS),
    Call("sched_getaffinity", 204, 123, _THREADS, (Check(0, (0,)),)),
    Call("getcpu", 309, 168, _THREADS),
    Call("gettid", 186, 178, _THREADS),
    Call("prctl", 157, 167, "name a thread", (Check(0, (_PR_SET_NAME, _PR_GET_NAME)),)),
    Call("exit", 60, 93, _THREADS),
    Call("exit_group", 231, 94, "end"),
    Call("restart_syscall", 219, 128, "resume after a signal"),
    Call("rt_sigaction", 13, 134, _SIGNAL),
    Call("rt_sigprocmask", 14, 135, _SIGNAL),
    Call("rt_sigreturn", 15, 139, _SIGNAL),
    Call("sigaltstack", 131, 132, _SIGNAL),
    Call("poll", 7, None, _WAIT),
    Call("ppoll", 271, 73, _WAIT),
    Call("select", 23, None, _WAIT),
    Call("pselect6", 270, 72, _WAIT),
    Call("epoll_create1", 291, 20, _WAIT),
    Call("epoll_ctl", 233, 21, _WAIT),
    Call("epoll_wait", 232, None, _WAIT),
    Call("epoll_pwait", 281, 22, _WAIT),
    Call("socketpair", 53, 199, _PAIR, _STREAM),
    Call("sendto", 44, 206, _PAIR, (Check(4, (0,), upper_zero=True),)),
    Call("recvfrom", 45, 207, _PAIR),
    Call("shutdown", 48, 210, _PAIR),
    Call("getsockname", 51, 204, _PAIR),
    Call("getrandom", 318, 278, "random numbers"),
    Call("uname", 63, 160, _WHO),
    Call("sysinfo", 99, 179, _WHO),
    Call("getpid", 39, 172, _WHO),
    Call("getppid", 110, 173, _WHO),
    Call("getuid", 102, 174, _WHO),
    Call("geteuid", 107, 175, _WHO),
    Call("getgid", 104, 176, _WHO),
    Call("getegid", 108, 177, _WHO),
    Call("prlimit64", 302, 261, "read its own limits", _NO_NEW_LIMIT),
    Call("getrlimit", 97, 163, "read its own limits"),
)

ANSWERED_AS_MISSING: tuple[Call, ...] = (
    Call("clone3", 435, 435, "libc falls back to clone, whose flags can be checked"),
    Call("openat2", 437, 437, "libc falls back to openat, whose flags can be checked"),
)
