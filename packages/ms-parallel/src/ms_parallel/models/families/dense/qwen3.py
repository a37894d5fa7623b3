"""Qwen 3 (Yang et al., 2025): norms over each head of queries and keys."""

from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.positions.windows import UPPER_LAYERS

FAMILY = DenseFamily(
    name="qwen3",
    transformers_class="Qwen3ForCausalLM",
    fixed={"mlp_bias": False, "query_key_norm": True},
    silent={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
        "head_dim": 128,
    },
    windows=UPPER_LAYERS,
    small={"tie_word_embeddings": True},
)
