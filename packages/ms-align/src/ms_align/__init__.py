"""Instruction tuning, reward models, PPO and its kin: exact, resumable, alone or on any engine."""

from ms_align.advantage import gae
from ms_align.errors import (
    AlignError,
    CheckpointError,
    ConfigError,
    DamageError,
    DataError,
    ModelError,
    NothingToLearnError,
    RewardError,
)

__version__ = "0.1.0"

__all__ = [
    "AlignError",
    "CheckpointError",
    "ConfigError",
    "DamageError",
    "DataError",
    "ModelError",
    "NothingToLearnError",
    "RewardError",
    "__version__",
    "gae",
]
