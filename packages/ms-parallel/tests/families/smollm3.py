"""SmolLM 3."""

from random import Random
from typing import Any

MODEL_TYPE = "smollm3"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": random.choice([3, 5])}
    return {
        "attention_bias": random.random() < 0.5,
        "mlp_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.5,
        **random.choice([{}, {"no_rope_layer_interval": 2}, {"no_rope_layers": [0, 1, 1, 0]}]),
        **random.choice([{}, window, {**window, "layer_types": kinds}]),
        **random.choice([{}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"no_rope_layers": [1, 0]}, "must have 0 or 1 for each of 4 layers"),
    ({"no_rope_layers": "1111"}, "got 1111"),
    ({"no_rope_layer_interval": 0, "no_rope_layers": None}, "no_rope_layer_interval must be"),
    ({"use_sliding_window": 1}, "use_sliding_window must be true or false, got 1"),
]
