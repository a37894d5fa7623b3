from . import checkpoint
from .cluster.connection import connect
from .cluster.error_report import report_error
from .cluster.layout import Layout
from .cluster.mixed.devices import Devices
from .engine.engine import Engine
from .engine.loss import NextTokenLoss
from .engine.report import StepReport
from .errors import (
    CheckpointError,
    ConfigError,
    DamageError,
    DivergenceError,
    LaunchError,
    LayoutError,
    ModelError,
    NonFiniteError,
    ParallelError,
    ScheduleError,
    StageError,
)
from .models.plan import ModelPlan
from .optim.clipping import StepLimits
from .optim.loss_scale_settings import LossScale
from .optim.optimizers.adafactor import AdafactorConfig
from .optim.optimizers.adamw import AdamWConfig
from .optim.optimizers.muon import MuonConfig
from .optim.optimizers.sgd import SGDConfig
from .optim.optimizers.torch_class import TorchConfig
from .planner.tuning import search_schedule
from .training.result import Result
from .training.trainer import DistributedTrainer
from .weights import load_model, save_model

__version__: str

__all__ = [
    "AdafactorConfig",
    "AdamWConfig",
    "CheckpointError",
    "ConfigError",
    "DamageError",
    "Devices",
    "DistributedTrainer",
    "DivergenceError",
    "Engine",
    "LaunchError",
    "Layout",
    "LayoutError",
    "LossScale",
    "ModelError",
    "ModelPlan",
    "MuonConfig",
    "NextTokenLoss",
    "NonFiniteError",
    "ParallelError",
    "Result",
    "SGDConfig",
    "ScheduleError",
    "StageError",
    "StepLimits",
    "StepReport",
    "TorchConfig",
    "__version__",
    "checkpoint",
    "connect",
    "load_model",
    "report_error",
    "save_model",
    "search_schedule",
]
