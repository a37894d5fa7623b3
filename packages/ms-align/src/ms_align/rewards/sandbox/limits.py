"""Resource limits and outcomes of sandboxed programs."""

from attrs import field, frozen

from ms_align.settings import flag, integer, number


@frozen(kw_only=True)
class Limits:
    """Resource limits of a program; its tests have the same limits on top."""

    wall_s: float = field(default=5.0, validator=number(minimum=0.01))
    """Wall-clock limit in seconds; the program is killed at most half a second later."""
    cpu_s: int = field(default=4, validator=integer())
    """CPU time limit in seconds, over all threads."""
    memory_mib: int = field(default=512, validator=integer(minimum=64))
    """Address space limit in MiB, including some 40 MiB of the interpreter."""
    output_kib: int = field(default=1024, validator=integer())
    """Output limit in KiB; a program that prints more is killed."""
    unconfined: bool = field(default=False, validator=flag)
    """Run even if this machine lacks some of the sandbox's protections."""


@frozen(kw_only=True)
class Outcome:
    """Result of a program."""

    passed: bool
    """`judge`: the tests completed. `run_python`: the program reports that it completed."""
    reason: str
    """`passed`, `failed`, `timeout`, `memory`, `output` or `ended early`."""
    output: str
    """End of the output of the program and its tests."""
    confined: bool
    """True if all protections were active."""
