from .engine import Engine, Update
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
from .layout import Layout
from .loss import NextTokenLoss
from .models import load_model, save_model
from .optimizer import AdamWConfig
from .plan import ModelPlan
from .planner.tuning import search_schedule
from .trainer import DistributedTrainer, Result

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
