"""Qwen 3 with experts."""

from random import Random
from typing import Any

MODEL_TYPE = "qwen3_moe"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "head_dim": random.choice([8, 12]),
        "num_experts": random.choice([4, 7]),
        "num_experts_per_tok": random.choice([1, 2, 4]),
        "moe_intermediate_size": random.choice([12, 20]),
        "norm_topk_prob": random.random() < 0.5,
        "decoder_sparse_step": random.choice([1, 1, 2]),
        "mlp_only_layers": random.choice([[], [0], [1, 2]]),
        "use_sliding_window": random.random() < 0.3,
        "sliding_window": 5,
        "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most"),
    ({"mlp_only_layers": 3}, "got '3'"),
]
