"""Qwen 3 (Yang et al., 2025): norms over each head of queries and keys."""

from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.positions.window_format import UPPER_LAYERS

FAMILY = DecoderFamily(
    name="qwen3",
    transformers_class="Qwen3ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": True},
    transformers_defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    windows=UPPER_LAYERS,
    small={"tie_word_embeddings": True},
)
