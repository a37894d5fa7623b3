"""Models as single-device code, each with the plan of how it may be split."""

from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import DecoderConfig, ModelConfig, RopeScaling
from ms_parallel.models.decoder import Decoder
from ms_parallel.models.initialise import initialise
from ms_parallel.models.load import has_weights, load_model, load_weights
from ms_parallel.models.registry import architecture, build_model, model_plan
from ms_parallel.models.save import save_model
from ms_parallel.models.staged import StagedModel
from ms_parallel.models.transformer_xl import TransformerXL, TransformerXLConfig

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KeyValueCache",
    "ModelConfig",
    "RopeScaling",
    "StagedModel",
    "TransformerXL",
    "TransformerXLConfig",
    "architecture",
    "build_model",
    "has_weights",
    "initialise",
    "load_model",
    "load_weights",
    "model_plan",
    "save_model",
]
