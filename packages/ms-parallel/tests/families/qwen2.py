"""Qwen 2 and 2.5."""

from random import Random
from typing import Any

MODEL_TYPE = "qwen2"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    windows = {"sliding_window": 5, "max_window_layers": random.choice([0, 2, 4])}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    return {
        "num_key_value_heads": random.choice([1, 2, 4]),
        "tie_word_embeddings": random.random() < 0.5,
        "use_sliding_window": random.random() < 0.7,
        **windows,
        **random.choice([{}, {"rope_parameters": {"rope_theta": 1e4, **yarn}}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"use_sliding_window": "yes"}, "use_sliding_window"),
]
