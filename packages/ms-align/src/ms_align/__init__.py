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
from ms_align.lora import AdaptedModel, LoraOptions, add_lora
from ms_align.lora_load import load_lora
from ms_align.parallel import ParallelEngine
from ms_align.reward import Reward, Sample
from ms_align.reward_model import RewardModel
from ms_align.sampling import Sampling
from ms_align.sandbox import Limits
from ms_align.task_sampler import TaskOptions
from ms_align.trainers.grpo import GRPOTrainer
from ms_align.trainers.ppo import PPOTrainer
from ms_align.trainers.preference import DPOOptions, DPOTrainer, RewardOptions, RewardTrainer
from ms_align.trainers.rloo import RLOOTrainer
from ms_align.trainers.sft import SFTOptions, SFTTrainer
from ms_align.verifiable import ExactMatch, Numeric, PythonParses, PythonTests

__version__ = "0.1.0"

__all__ = [
    "AdaptedModel",
    "AlignError",
    "CheckpointError",
    "ConfigError",
    "DPOOptions",
    "DPOTrainer",
    "DamageError",
    "DataError",
    "ExactMatch",
    "GRPOTrainer",
    "Generator",
    "Limits",
    "LocalEngine",
    "LocalGenerator",
    "LoraOptions",
    "ModelError",
    "NothingToLearnError",
    "Numeric",
    "PPOTrainer",
    "ParallelEngine",
    "PythonParses",
    "PythonTests",
    "RLOOTrainer",
    "Responses",
    "Reward",
    "RewardError",
    "RewardModel",
    "RewardOptions",
    "RewardTrainer",
    "SFTOptions",
    "SFTTrainer",
    "Sample",
    "Sampling",
    "TaskOptions",
    "__version__",
    "add_lora",
    "gae",
    "load_lora",
]
