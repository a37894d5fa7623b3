"""Mistral (Jiang et al., 2023): a sliding window, no biases."""

from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.positions.window_format import LISTED_LAYERS

FAMILY = DecoderFamily(
    name="mistral",
    transformers_class="MistralForCausalLM",
    fixed={"attention_bias": False, "mlp_bias": False, "query_key_norm": False},
    transformers_defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    windows=LISTED_LAYERS,
    null_head_dim=True,
    small={"sliding_window": 1024},
)
