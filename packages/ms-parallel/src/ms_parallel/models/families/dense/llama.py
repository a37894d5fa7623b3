"""Llama (Touvron et al., 2023) and models with the same architecture."""

from ms_parallel.models.decoder_family import DecoderFamily

FAMILY = DecoderFamily(
    name="llama",
    transformers_class="LlamaForCausalLM",
    fixed={"query_key_norm": False},
    transformers_defaults={"max_position_embeddings": 2048},
    null_head_dim=True,
    heads_divide_hidden=True,
)
