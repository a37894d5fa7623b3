"""Mistral (Jiang et al., 2023): a sliding window, no biases."""

from ms_parallel.models.dense import DenseFamily
from ms_parallel.models.positions.windows import EVERY_LAYER

FAMILY = DenseFamily(
    name="mistral",
    transformers_class="MistralForCausalLM",
    fixed={"attention_bias": False, "mlp_bias": False, "query_key_norm": False},
    silent={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    windows=EVERY_LAYER,
    null_head_dim=True,
    small={"sliding_window": 1024},
)
