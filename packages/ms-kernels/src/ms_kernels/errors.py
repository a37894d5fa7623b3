"""Every error this package raises on purpose; each is also the builtin that fits."""

__all__ = ["ArgumentError", "BackendError", "KernelError", "TableError"]


class KernelError(Exception):
    """Base of all errors of ms-kernels. Its text is one line: what, where, the remedy."""


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
