"""Every error this package raises on purpose; each is also the builtin that fits."""

from typing import ClassVar


class AlignError(Exception):
    """Base of all errors of ms-align. Its text is one line: what, where, the remedy."""

    exit_code: ClassVar[int] = 2
    """How a command ends that raises it: what was given has to be mended."""


class ConfigError(AlignError, ValueError):
    """A setting or run file that cannot be used as given."""


class DataError(AlignError, ValueError):
    """A dataset, prompt or tokenizer that cannot be used as given."""


class ModelError(AlignError, ValueError):
    """A model that lacks what is asked of it, or does not fit its tokenizer."""


class RewardError(AlignError, RuntimeError):
    """A reward that raised, or returned what is no reward: names the sample."""


class NonFiniteError(AlignError, RuntimeError):
    """Weights or gradients that are infinite or no numbers: the run has failed."""

    exit_code: ClassVar[int] = 1


class NothingToLearnError(AlignError, RuntimeError):
    """A step that would change nothing, such as one with an empty loss mask or equal rewards."""


class CheckpointError(AlignError, RuntimeError):
    """A checkpoint that cannot be written, or does not belong to this run."""


class DamageError(CheckpointError):
    """Bytes of a checkpoint that are not those that were written: names the file."""


class WriteError(CheckpointError):
    """A file or folder that the operating system does not let be written."""


class FolderError(CheckpointError):
    """A run's folder that another process holds, or that belongs to another run."""
