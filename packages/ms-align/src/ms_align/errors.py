"""Exceptions of ms-align; each also derives from the built-in exception that fits."""

from typing import ClassVar


class AlignError(Exception):
    """Base class of all ms-align errors. The message is one line: problem, location, remedy."""

    exit_code: ClassVar[int] = 2
    """Exit code of a command that raises this error: 2 for bad input, 1 for a failed run."""


class ConfigError(AlignError, ValueError):
    """Invalid setting or run file."""


class DataError(AlignError, ValueError):
    """Invalid dataset, prompt or tokenizer."""


class ModelError(AlignError, ValueError):
    """Model that lacks a required feature or does not match its tokenizer."""


class RewardError(AlignError, RuntimeError):
    """Reward function that raised or returned something other than numbers; names the sample."""


class NonFiniteError(AlignError, RuntimeError):
    """Infinite or NaN weights or gradients; the run has failed."""

    exit_code: ClassVar[int] = 1


class NothingToLearnError(AlignError, RuntimeError):
    """Step that would change nothing, such as one with an empty loss mask or equal rewards."""


class CheckpointError(AlignError, RuntimeError):
    """Checkpoint that cannot be written or belongs to another run."""


class DamageError(CheckpointError):
    """Checkpoint file whose content differs from its checksum; names the file."""


class WriteError(CheckpointError):
    """File or folder that the operating system refuses to write."""


class FolderError(CheckpointError):
    """Output folder that is locked by another process or belongs to another run."""


class ServerError(AlignError, RuntimeError):
    """Rollout server that cannot be reached, failed, or gave an unusable answer."""

    exit_code: ClassVar[int] = 1
