"""Llama."""

from random import Random
from typing import Any

MODEL_TYPE = "llama"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    original = {"original_max_position_embeddings": 16, "factor": random.choice([2.0, 8.0])}
    ropes: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
        {"rope_type": "yarn", **original},
    ]
    return {
        "hidden_size": random.choice([32, 48]),
        "head_dim": random.choice([8, 12, None]),
        "num_key_value_heads": random.choice([1, 2, 4]),
        "attention_bias": random.random() < 0.5,
        "mlp_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
        "rms_norm_eps": random.choice([1e-6, 1e-3]),
        "rope_parameters": {"rope_theta": random.choice([50.0, 5e5]), **random.choice(ropes)},
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral' is not supported"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads"),
]
