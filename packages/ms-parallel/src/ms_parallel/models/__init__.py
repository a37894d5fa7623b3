"""Models as single-device code, each with a plan of the supported ways to split it."""

from ms_parallel.models.cache import KeyValueCache
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.decoder import Decoder
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.experts.routing import record_experts, replay_experts
from ms_parallel.models.families.transformer_xl import TransformerXL, TransformerXLConfig
from ms_parallel.models.huggingface.config import TransformersModel
from ms_parallel.models.huggingface.multimodal import MultimodalModel
from ms_parallel.models.positions.scaling import RopeScaling
from ms_parallel.models.registry import architecture, build_model, model_plan
from ms_parallel.models.staged import StagedModel

__all__ = [
    "Decoder",
    "DecoderConfig",
    "KeyValueCache",
    "ModelConfig",
    "MultimodalModel",
    "RopeScaling",
    "StagedModel",
    "TransformerXL",
    "TransformerXLConfig",
    "TransformersModel",
    "architecture",
    "build_model",
    "model_plan",
    "record_experts",
    "replay_experts",
]
