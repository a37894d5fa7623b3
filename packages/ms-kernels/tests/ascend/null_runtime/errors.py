"""What the null runtime reports."""

from ms_kernels.errors import KernelError

__all__ = ["NullRuntimeError"]


class NullRuntimeError(KernelError, RuntimeError):
    """The null runtime cannot be built or started here; says what is missing."""
