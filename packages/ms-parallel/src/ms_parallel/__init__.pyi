from .cluster.layout import Layout
from .engine.engine import Engine, Update
from .engine.loss import NextTokenLoss
from .engine.optimizer import AdamWConfig
from .errors import (
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
from .models.plan import ModelPlan
from .planner.tuning import search_schedule
from .training.result import Result
from .training.trainer import DistributedTrainer
from .weights import load_model, save_model

__version__: str

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
