"""Models as single-device code, each with the plan of how it may be split."""

from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import DecoderConfig, RopeScaling
from ms_parallel.models.decoder import Decoder
from ms_parallel.models.initialise import initialise
from ms_parallel.models.registry import architecture, build_model, model_plan

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KeyValueCache",
    "RopeScaling",
    "architecture",
    "build_model",
    "initialise",
    "model_plan",
]
