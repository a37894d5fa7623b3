"""Gemma 3, text."""

from random import Random
from typing import Any

MODEL_TYPE = "gemma3_text"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    linear = {"rope_type": "linear", "factor": 4.0}
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    return {
        "hidden_size": random.choice([32, 48]),
        "head_dim": random.choice([8, 12]),
        "query_pre_attn_scalar": random.choice([8, 24]),
        "final_logit_softcapping": random.choice([None, 3.0]),
        "sliding_window": random.choice([3, 5]),
        "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.7,
        **random.choice([{}, {"sliding_window_pattern": random.choice([1, 2, 3])}]),
        **random.choice([{}, {"rope_scaling": linear}, {"rope_parameters": both}]),
        **random.choice([{}, {"rope_theta": 400.0, "rope_local_base_freq": 30.0}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
    (
        {"sliding_window_pattern": 0},
        "sliding_window_pattern must be an integer of at least 1, got 0",
    ),
    (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "with the keys full_attention and",
    ),
    (
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_type of sliding_attention must be 'default', got 'linear'",
    ),
    ({"rope_scaling": {"rope_type": "linear"}, "rope_parameters": None}, "needs 'factor'"),
]
