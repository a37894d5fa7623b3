"""What a judged program may use, and what became of it."""

from attrs import field, frozen

from ms_align.settings import flag, number, whole


@frozen(kw_only=True)
class Limits:
    """What a program may use. Tests, which run beside it, may use as much again."""

    wall_s: float = field(default=5.0, validator=number(least=0.01))
    """Seconds from its start to its end; it is gone half a second later."""
    cpu_s: int = field(default=4, validator=whole())
    """Seconds of processor time, of all its threads together."""
    memory_mib: int = field(default=512, validator=whole(least=64))
    """Address space, that of the interpreter (some 40 MiB) included."""
    output_kib: int = field(default=1024, validator=whole())
    """What it may print; it is killed beyond."""
    unconfined: bool = field(default=False, validator=flag)
    """Run with what walls there are where this machine offers too few for the promise."""


@frozen(kw_only=True)
class Outcome:
    """What became of a program."""

    passed: bool
    """`judge`: the tests ran to their end. `run_python`: the program says that it did."""
    reason: str
    """`passed`, `failed`, `timeout`, `memory`, `output` or `ended early`."""
    output: str
    """The end of what it printed, and of what its tests printed."""
    confined: bool
    """Whether every wall that the promise needs stood."""
