"""Mixtral."""

from random import Random
from typing import Any

MODEL_TYPE = "mixtral"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    experts = random.choice([2, 5, 8])
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": random.randint(1, min(3, experts)),
        "num_key_value_heads": random.choice([1, 2, 4]),
        "head_dim": random.choice([8, 12, None]),
        "sliding_window": random.choice([None, 5]),
        "tie_word_embeddings": random.random() < 0.5,
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most"),
    ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
    ({"layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types="),
]
