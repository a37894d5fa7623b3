"""Granite."""

from random import Random
from typing import Any

MODEL_TYPE = "granite"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "attention_bias": random.random() < 0.5,
        "mlp_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
        "embedding_multiplier": random.choice([1.0, 12.0]),
        "attention_multiplier": random.choice([1.0, 0.125]),
        "residual_multiplier": random.choice([1.0, 0.22]),
        "logits_scaling": random.choice([1.0, 3.0]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logits_scaling": 0}, "logits_scaling must be"),
    (
        {"residual_multiplier": "x"},
        "residual_multiplier must be a number of at least 1e-30, got 'x'",
    ),
]
