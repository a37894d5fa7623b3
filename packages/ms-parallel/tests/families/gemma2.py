"""Gemma 2."""

from random import Random
from typing import Any

MODEL_TYPE = "gemma2"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    kinds = ["sliding_attention", "full_attention"]
    return {
        "hidden_size": random.choice([32, 48]),
        "head_dim": random.choice([8, 12]),
        "query_pre_attn_scalar": random.choice([8, 24]),
        "attn_logit_softcapping": random.choice([None, 2.0, 50.0]),
        "final_logit_softcapping": random.choice([None, 3.0, 30.0]),
        "sliding_window": random.choice([3, 5, 100]),
        "attention_bias": random.random() < 0.5,
        "tie_word_embeddings": random.random() < 0.7,
        **random.choice([{}, {"layer_types": [random.choice(kinds) for _ in range(4)]}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window": None}, "sliding_window must be an integer of at least 1, got None"),
    (
        {"attn_logit_softcapping": "50"},
        "attn_logit_softcapping must be a number of at least 1e-30, got '50'",
    ),
    ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be"),
    ({"hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ({"layer_types": ["full_attention"]}, "layer_types must be"),
]
