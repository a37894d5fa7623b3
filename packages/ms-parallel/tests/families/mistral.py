"""Mistral."""

from random import Random
from typing import Any

MODEL_TYPE = "mistral"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "head_dim": random.choice([8, 12, None]),
        "num_key_value_heads": random.choice([1, 2, 4]),
        "sliding_window": random.choice([None, 3, 5]),
        "tie_word_embeddings": random.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": random.choice([50.0, 1e6])},
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window": -1}, "sliding_window"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
]
