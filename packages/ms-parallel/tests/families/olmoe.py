"""OLMoE."""

from random import Random
from typing import Any

MODEL_TYPE = "olmoe"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    return {
        "num_key_value_heads": random.choice([2, 4]),
        "num_experts": random.choice([4, 7]),
        "num_experts_per_tok": random.choice([1, 2, 4]),
        "norm_topk_prob": random.random() < 0.5,
        "attention_bias": random.random() < 0.3,
        "tie_word_embeddings": random.random() < 0.5,
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok must be at most"),
    ({"clip_qkv": 0.5}, "clip_qkv=0.5 is not supported"),
]
