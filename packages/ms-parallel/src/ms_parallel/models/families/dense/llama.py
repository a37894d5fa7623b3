"""Llama (Touvron et al., 2023) and what is built like it."""

from ms_parallel.models.dense import DenseFamily

FAMILY = DenseFamily(
    name="llama",
    transformers_class="LlamaForCausalLM",
    fixed={"query_key_norm": False},
    silent={"max_position_embeddings": 2048},
    null_head_dim=True,
    whole_heads=True,
)
