"""Qwen 3."""

from random import Random
from typing import Any

MODEL_TYPE = "qwen3"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "head_dim": random.choice([8, 12, 16]),
        "num_key_value_heads": random.choice([1, 2, 4]),
        "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
        "use_sliding_window": random.random() < 0.5,
        "sliding_window": 5,
        "max_window_layers": random.choice([0, 2, 4]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 7}, "head_dim"),
]
