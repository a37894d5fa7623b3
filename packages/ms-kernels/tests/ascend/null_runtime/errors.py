"""Errors of the null runtime."""

from ms_kernels.errors import KernelError

__all__ = ["NullRuntimeError"]


class NullRuntimeError(KernelError, RuntimeError):
    """The null runtime cannot be built or started; the message names the missing part."""
