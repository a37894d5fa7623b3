"""Errors raised by this package; they also derive from a suitable builtin exception."""

from typing import ClassVar

SHOWN_CHARACTERS = 80
"""Maximum characters of a value in a message."""


def shown(value: object) -> str:
    """Format a value for a message, on one line of bounded length."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"an integer of {value.bit_length()} bits"  # str() fails above 4,300 digits
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a failing __repr__ must not hide the actual error
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


class KernelError(Exception):
    """Base class of the errors of ms-kernels; the message is one line."""

    exit_code: ClassVar[int] = 2
    """Exit code of commands: 2, bad input."""


class ArgumentError(KernelError, ValueError):
    """An argument that violates the operator's contract.

    Attributes:
        operator: name of the operator, such as ``"rms_norm"``.
        argument: name of the argument.
        got: description of the value passed.
        fits: description of the accepted values.
    """

    def __init__(self, operator: str, argument: str, got: str, fits: str) -> None:
        super().__init__(f"{operator}: {argument} is {got}; it must be {fits}")
        self.operator = operator
        self.argument = argument
        self.got = got
        self.fits = fits


class BackendError(KernelError, RuntimeError):
    """A backend is unknown, not available on this machine, or does not support the call."""


class TableError(KernelError, ValueError):
    """A tuning table is damaged, or the file is not a tuning table."""
