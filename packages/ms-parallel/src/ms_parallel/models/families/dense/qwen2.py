"""Qwen 2 (Yang et al., 2024): biases before attention alone."""

from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.positions.windows import UPPER_LAYERS

FAMILY = DenseFamily(
    name="qwen2",
    transformers_class="Qwen2ForCausalLM",
    fixed={"attention_bias": True, "mlp_bias": False, "query_key_norm": False},
    silent={"max_position_embeddings": 32768, "num_key_value_heads": 32, "max_window_layers": 28},
    windows=UPPER_LAYERS,
    output_bias=False,
    small={"tie_word_embeddings": True},
)
