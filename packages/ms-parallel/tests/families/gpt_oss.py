"""Gpt-oss."""

from random import Random
from typing import Any

from transformers import GptOssConfig

MODEL_TYPE = "gpt_oss"
CLAMPS = [0.5, 7.0] if hasattr(GptOssConfig(), "swiglu_alpha") else [7.0]
"""transformers before 5.19 ignores the setting and uses 7.0."""
LAYER_TYPES = ("sliding_attention", "full_attention")


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    plain = {"rope_type": "default", "rope_theta": 1e4}
    mixed = {"layer_types": [random.choice(LAYER_TYPES) for _ in range(4)]}
    return {
        "head_dim": random.choice([8, 16]),
        "num_key_value_heads": random.choice([1, 2, 4]),
        "sliding_window": random.choice([3, 5]),
        "num_local_experts": random.choice([4, 6]),
        "num_experts_per_tok": random.choice([1, 2, 4]),
        "swiglu_limit": random.choice(CLAMPS),
        "rope_parameters": random.choice(
            [plain, {"rope_theta": 1e4, "truncate": random.random() < 0.5, **yarn}]
        ),
        **random.choice([{}, mixed]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most"),
    ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
]
