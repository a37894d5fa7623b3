"""Exceptions: each one is a `CompressError` and the closest builtin exception."""

from typing import ClassVar


class CompressError(Exception):
    """Base class of all ms-compress errors; the message is one line: problem and remedy."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that raises this error: 2, bad input."""


class ConfigError(CompressError, ValueError):
    """A setting or run file is invalid."""


class SchemeError(CompressError, ValueError):
    """A scheme does not exist, or its numbers are inconsistent."""


class LayerError(CompressError, ValueError):
    """A scheme, mask or target does not support a layer, which the message names."""


class OrderError(CompressError, RuntimeError):
    """A model was split, sharded and prepared in an unsupported order."""


class CalibrationError(CompressError, RuntimeError):
    """Calibration produced NaN or infinity, or had no tokens; the message names the layer."""


class DataError(CompressError, ValueError):
    """Text or tokens are unusable."""


class ExportError(CompressError, RuntimeError):
    """A file cannot be written, or the target does not support the model."""


class DivergedError(CompressError, RuntimeError):
    """Weights or loss became NaN or infinite in training; the message names the tensor or step."""

    exit_code: ClassVar[int] = 1


class StoppedError(CompressError, RuntimeError):
    """A signal stopped a training run; its state is saved, and the same command resumes it."""

    exit_code: ClassVar[int] = 1


class VerifyError(CompressError, RuntimeError):
    """The runtime reads an exported file as a different model."""

    exit_code: ClassVar[int] = 1


class WriteError(ExportError):
    """The operating system refuses to write a file or folder."""


class FolderError(ExportError):
    """A run's folder is locked by another process, or belongs to another run."""
