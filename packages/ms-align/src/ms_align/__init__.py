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
from ms_align.generation import Generator, LocalGenerator, Responses
from ms_align.local import LocalEngine
from ms_align.reward import Reward, Sample
from ms_align.sampling import Sampling
from ms_align.trainers.grpo import GRPOTrainer
from ms_align.trainers.ppo import PPOTrainer
from ms_align.trainers.rloo import RLOOTrainer

__version__ = "0.1.0"

__all__ = [
    "AlignError",
    "CheckpointError",
    "ConfigError",
    "DamageError",
    "DataError",
    "GRPOTrainer",
    "Generator",
    "LocalEngine",
    "LocalGenerator",
    "ModelError",
    "NothingToLearnError",
    "PPOTrainer",
    "RLOOTrainer",
    "Responses",
    "Reward",
    "RewardError",
    "Sample",
    "Sampling",
    "__version__",
    "gae",
]
