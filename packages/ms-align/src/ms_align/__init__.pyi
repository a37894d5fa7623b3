"""The public names; `__init__.py` imports each when it is first asked for."""

from .advantage import gae
from .errors import (
    AlignError,
    CheckpointError,
    ConfigError,
    DamageError,
    DataError,
    FolderError,
    ModelError,
    NonFiniteError,
    NothingToLearnError,
    RewardError,
    WriteError,
)
from .generation import Generator, LocalGenerator, Responses
from .local import LocalEngine
from .lora import AdaptedModel, LoraOptions, add_lora
from .lora_load import load_lora
from .parallel import ParallelEngine
from .reward import Reward, Sample
from .reward_model import RewardModel
from .sampling import Sampling
from .sandbox import Limits
from .task_sampler import TaskOptions
from .trainers.grpo import GRPOTrainer
from .trainers.ppo import PPOTrainer
from .trainers.preference import DPOOptions, DPOTrainer, RewardOptions, RewardTrainer
from .trainers.rloo import RLOOTrainer
from .trainers.sft import SFTOptions, SFTTrainer
from .verifiable import ExactMatch, Numeric, PythonParses, PythonTests

__version__: str

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
    "FolderError",
    "GRPOTrainer",
    "Generator",
    "Limits",
    "LocalEngine",
    "LocalGenerator",
    "LoraOptions",
    "ModelError",
    "NonFiniteError",
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
    "WriteError",
    "__version__",
    "add_lora",
    "gae",
    "load_lora",
]
