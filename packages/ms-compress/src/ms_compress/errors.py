"""Every error this package raises on purpose; each is also the builtin that fits."""

from typing import ClassVar


class CompressError(Exception):
    """Base of all errors of ms-compress. Its text is one line: what, where, the remedy."""

    exit_code: ClassVar[int] = 2
    """How a command ends that raises it: what was given has to be mended."""


class ConfigError(CompressError, ValueError):
    """A setting or run file that cannot be used as given."""


class SchemeError(CompressError, ValueError):
    """A scheme that does not exist, or whose numbers do not fit together."""


class LayerError(CompressError, ValueError):
    """A layer that a scheme, a mask or a target cannot take: names the layer and what fits."""


class OrderError(CompressError, RuntimeError):
    """A model that was split, sharded and prepared in an order that cannot be right."""


class CalibrationError(CompressError, RuntimeError):
    """Calibration that met NaN or infinity, or had no tokens: names the layer."""


class DataError(CompressError, ValueError):
    """Text or tokens that cannot be used as given."""


class ExportError(CompressError, RuntimeError):
    """A file that cannot be written, or a model that the target does not know."""


class DivergedError(CompressError, RuntimeError):
    """A training whose weights or loss became NaN or infinite: names the tensor or the step."""

    exit_code: ClassVar[int] = 1


class VerifyError(CompressError, RuntimeError):
    """A file that its runtime reads as another model than the one that was exported."""

    exit_code: ClassVar[int] = 1


class WriteError(ExportError):
    """A file or folder that the operating system does not let be written."""


class FolderError(ExportError):
    """A run's folder that another process holds, or that belongs to another run."""
