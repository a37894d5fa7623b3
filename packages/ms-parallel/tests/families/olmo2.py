"""OLMo 2."""

from random import Random
from typing import Any

MODEL_TYPE = "olmo2"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "num_key_value_heads": random.choice([1, 2, 4]),
        "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
        **random.choice([{}, {"rms_norm_eps": 1e-3}]),
        **random.choice([{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
    ({"mlp_bias": True}, "mlp_bias=True is not supported"),
]
