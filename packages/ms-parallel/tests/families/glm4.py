"""GLM-4."""

from random import Random
from typing import Any

MODEL_TYPE = "glm4"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "head_dim": random.choice([8, 16]),
        "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.3,
        **random.choice([{}, {"partial_rotary_factor": random.choice([0.25, 0.5, 1.0])}]),
        **random.choice([{}, {"rms_norm_eps": 1e-3}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": None, "partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
    ({"rope_parameters": None, "partial_rotary_factor": 0.1}, "even and at least 2, got"),
    ({"mlp_bias": True}, "mlp_bias=True is not supported"),
]
