"""Every error this package raises on purpose; each is also the builtin that fits."""

from typing import Any, ClassVar


class ParallelError(Exception):
    """Base of all errors of ms-parallel. Its text is one line: what, where, the remedy."""

    exit_code: ClassVar[int] = 2
    """How a command ends that raises it: what was given has to be mended."""


class LayoutError(ParallelError, ValueError):
    """A layout that does not fit the processes or the model."""


class ConfigError(ParallelError, ValueError):
    """A setting, run file or folder that cannot be used as given."""


class ModelError(ParallelError, ValueError):
    """A model folder or architecture that cannot be built or read."""


class NonFiniteError(ParallelError, ArithmeticError):
    """Weights that have become NaN or infinite: names the tensor. Nothing is saved of them."""

    exit_code: ClassVar[int] = 1


class DivergenceError(ParallelError, ArithmeticError):
    """A run whose losses or gradients are not finite, or spikes: `on_nonfinite`, `on_spike`."""

    exit_code: ClassVar[int] = 1


class CheckpointError(ParallelError, RuntimeError):
    """A checkpoint that cannot be written, or does not belong to this run."""


class DamageError(CheckpointError):
    """Bytes of a checkpoint that are not those that were written: names the file and the part."""


class LaunchError(ParallelError, RuntimeError):
    """Processes that were not started as the layout needs."""


class ScheduleError(ParallelError, ValueError):
    """A pipeline schedule that is malformed, incomplete or would deadlock."""


class StageError(ParallelError, RuntimeError):
    """A pipeline stage that raised in mid-step: names stage, rank and microbatch, on every rank.

    If an error of this package was raised, the StageError is an instance of its class too, on
    every rank, and has its exit code.
    """

    exit_code: ClassVar[int] = 1

    @classmethod
    def of(cls, name: str, text: str) -> "StageError":
        """Make the error for a class of this module by name; other names give a plain one."""
        original = globals().get(name)
        if not (isinstance(original, type) and issubclass(original, ParallelError)):
            return cls(text)
        if issubclass(cls, original):
            return cls(text)
        members = {"exit_code": original.exit_code, "__module__": __name__}
        combined: type[StageError] = type(name, (original, cls), members)
        return combined(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a combined class, which no module holds, pass between processes."""
        return StageError.of, (type(self).__name__, str(self))


class WriteError(CheckpointError):
    """A file or folder that the operating system does not let be written."""


class StuckWriterError(CheckpointError):
    """A process that writes checkpoints and makes no progress: names its rank."""

    exit_code: ClassVar[int] = 1


class FolderError(CheckpointError):
    """A run's folder that another process holds, or that belongs to another run."""
