"""Public names; `__init__.py` imports each one on first use."""

from .engines.assembly import start_engine
from .engines.local import LocalEngine
from .environments.options import ToolLimits
from .environments.tools import Environment
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
    ServerError,
    WriteError,
)
from .generation.generator import LocalGenerator
from .generation.responses import Generator, Responses, RolloutEngine
from .generation.sampling import Sampling
from .lora.adapters import AdaptedModel, add_lora
from .lora.loading import load_lora
from .lora.options import LoraOptions
from .losses.advantage import gae
from .losses.distillation import GKDOptions
from .losses.preference import DPOOptions
from .losses.unpaired import KTOOptions
from .models.reward_model import RewardModel
from .rewards.sandbox import Limits
from .rewards.scoring import Reward, Sample
from .rewards.verifiable import ExactMatch, Numeric, PythonParses, PythonTests
from .rollouts.vllm.options import VllmOptions
from .streams.task_sampler import TaskOptions
from .trainers.dpo import DPOTrainer
from .trainers.gkd import GKDTrainer
from .trainers.grpo import GRPOTrainer
from .trainers.kto import KTOTrainer
from .trainers.ppo import PPOTrainer
from .trainers.reward import RewardOptions, RewardTrainer
from .trainers.rloo import RLOOTrainer
from .trainers.sft import SFTOptions, SFTTrainer

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
    "Environment",
    "ExactMatch",
    "FolderError",
    "GKDOptions",
    "GKDTrainer",
    "GRPOTrainer",
    "Generator",
    "KTOOptions",
    "KTOTrainer",
    "Limits",
    "LocalEngine",
    "LocalGenerator",
    "LoraOptions",
    "ModelError",
    "NonFiniteError",
    "NothingToLearnError",
    "Numeric",
    "PPOTrainer",
    "PythonParses",
    "PythonTests",
    "RLOOTrainer",
    "Responses",
    "Reward",
    "RewardError",
    "RewardModel",
    "RewardOptions",
    "RewardTrainer",
    "RolloutEngine",
    "SFTOptions",
    "SFTTrainer",
    "Sample",
    "Sampling",
    "ServerError",
    "TaskOptions",
    "ToolLimits",
    "VllmOptions",
    "WriteError",
    "__version__",
    "add_lora",
    "gae",
    "load_lora",
    "start_engine",
]
