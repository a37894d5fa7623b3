"""Process layouts, pipeline schedules, sharded models and the trainer that runs them."""

from ms_parallel.engine import Engine, Update
from ms_parallel.errors import (
    CheckpointError,
    ConfigError,
    DamageError,
    LaunchError,
    LayoutError,
    ModelError,
    NonFiniteError,
    ParallelError,
    ScheduleError,
    StageError,
)
from ms_parallel.layout import Layout
from ms_parallel.loss import NextTokenLoss
from ms_parallel.models import load_model, save_model
from ms_parallel.optimizer import AdamWConfig
from ms_parallel.plan import ModelPlan
from ms_parallel.schedule_search import search_schedule
from ms_parallel.trainer import DistributedTrainer, Result

__version__ = "0.1.0"

__all__ = [
    "AdamWConfig",
    "CheckpointError",
    "ConfigError",
    "DamageError",
    "DistributedTrainer",
    "Engine",
    "LaunchError",
    "Layout",
    "LayoutError",
    "ModelError",
    "ModelPlan",
    "NextTokenLoss",
    "NonFiniteError",
    "ParallelError",
    "Result",
    "ScheduleError",
    "StageError",
    "Update",
    "__version__",
    "load_model",
    "save_model",
    "search_schedule",
]
