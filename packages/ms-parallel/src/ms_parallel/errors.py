"""Errors of ms-parallel; each also derives from a suitable builtin exception."""

from typing import Any, ClassVar


class ParallelError(Exception):
    """Base class of all errors. The message is one line: what must hold, what was got, a remedy."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that raises it; 2 means bad input."""


class LayoutError(ParallelError, ValueError):
    """The layout does not fit the processes or the model."""


class ConfigError(ParallelError, ValueError):
    """A setting, run file or folder is invalid."""


class ModelError(ParallelError, ValueError):
    """A model folder cannot be read, or an architecture cannot be built."""


class NonFiniteError(ParallelError, ArithmeticError):
    """Weights are NaN or infinite; names the tensor. Nothing is saved."""

    exit_code: ClassVar[int] = 1


class DivergenceError(ParallelError, ArithmeticError):
    """Losses or gradients are not finite, or spike; see `on_nonfinite` and `on_spike`."""

    exit_code: ClassVar[int] = 1


class CheckpointError(ParallelError, RuntimeError):
    """A checkpoint cannot be written, or does not belong to this run."""


class DamageError(CheckpointError):
    """A checkpoint is corrupt: its bytes do not match their checksum. Names the file and part."""


class LaunchError(ParallelError, RuntimeError):
    """The processes were not started as the layout requires."""


class ScheduleError(ParallelError, ValueError):
    """A pipeline schedule is malformed, incomplete or would deadlock."""


class StageError(ParallelError, RuntimeError):
    """A pipeline stage raised during a step; names stage, rank and microbatch on every rank.

    If the original error is a ParallelError, the StageError is also an instance of its class, on
    every rank, and has its exit code.
    """

    exit_code: ClassVar[int] = 1

    @classmethod
    def of(cls, name: str, text: str) -> "StageError":
        """Build a StageError that also derives from this module's class `name`, if it exists."""
        original = globals().get(name)
        if not (isinstance(original, type) and issubclass(original, ParallelError)):
            return cls(text)
        if issubclass(cls, original):
            return cls(text)
        members = {"exit_code": original.exit_code, "__module__": __name__}
        combined: type[StageError] = type(name, (original, cls), members)
        return combined(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Rebuild by name, since a combined class cannot be imported in another process."""
        return StageError.of, (type(self).__name__, str(self))


class WriteError(CheckpointError):
    """The operating system refuses to write a file or folder."""


class StuckWriterError(CheckpointError):
    """A process that writes checkpoints makes no progress; names its rank."""

    exit_code: ClassVar[int] = 1


class FolderError(CheckpointError):
    """An output folder is locked by another process, or belongs to another run."""
