"""Every error this package raises on purpose; each is also the builtin that fits."""

from typing import ClassVar

SHOWN_CHARACTERS = 80
"""Most characters of a value that a message shows."""


def shown(value: object) -> str:
    """Write a value as a message may hold it: in one line of bounded length."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"a whole number of {value.bit_length()} bits"  # Python writes none of 4,300 digits
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an argument's own mistake must not hide that it does not fit
        text = f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


class KernelError(Exception):
    """Base of all errors of ms-kernels. Its text is one line: what, where, the remedy."""

    exit_code: ClassVar[int] = 2
    """How a command ends that raises it: what was given has to be mended."""


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
