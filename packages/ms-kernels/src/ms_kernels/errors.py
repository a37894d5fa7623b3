"""Errors raised by this package; they also derive from a suitable builtin exception."""

from typing import ClassVar

SHOWN_CHARACTERS = 80
"""Maximum characters of a value in a message."""


def shown(value: object) -> str:
    """Format a value for a message: in one line of bounded length."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"a whole number of {value.bit_length()} bits"  # str() fails above 4,300 digits
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a failing __repr__ must not hide the actual error
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


class KernelError(Exception):
    """Base of all errors of ms-kernels. Its text is one line: what, where, the remedy."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that raises it: 2, bad input."""


class ArgumentError(KernelError, ValueError):
    """An argument that an operator's contract does not allow.

    Attributes:
        operator: name of the operator, such as ``"rms_norm"``.
        argument: name of the argument that does not fit.
        got: what was passed, described.
        fits: what would have been accepted.
    """

    def __init__(self, operator: str, argument: str, got: str, fits: str) -> None:
        super().__init__(f"{operator}: {argument} is {got}; it must be {fits}")
        self.operator = operator
        self.argument = argument
        self.got = got
        self.fits = fits


class BackendError(KernelError, RuntimeError):
    """A backend that is unknown, absent on this machine, or cannot take this call."""


class TableError(KernelError, ValueError):
    """A tuning table that is damaged, or not one."""
