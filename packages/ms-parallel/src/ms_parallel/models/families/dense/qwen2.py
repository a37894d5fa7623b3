"""Qwen 2 (Yang et al., 2024): biases in the query, key and value projections."""

from ms_parallel.models.decoder_family import DecoderFamily
from ms_parallel.models.positions.window_format import UPPER_LAYERS

FAMILY = DecoderFamily(
    name="qwen2",
    transformers_class="Qwen2ForCausalLM",
    fixed={"attention_bias": True, "mlp_bias": False, "query_key_norm": False},
    transformers_defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "max_window_layers": 28,
    },
    windows=UPPER_LAYERS,
    output_bias=False,
    small={"tie_word_embeddings": True},
)
