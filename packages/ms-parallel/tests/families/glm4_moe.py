"""GLM-4.5."""

from random import Random
from typing import Any

MODEL_TYPE = "glm4_moe"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    groups = random.choice([{}, {"n_group": 4, "topk_group": 2}, {"n_group": 2, "topk_group": 1}])
    return {
        "head_dim": random.choice([8, 16]),
        "num_key_value_heads": random.choice([1, 2, 4]),
        "use_qk_norm": random.random() < 0.5,
        "attention_bias": random.random() < 0.5,
        "moe_intermediate_size": random.choice([12, 20]),
        "n_routed_experts": 8,
        "num_experts_per_tok": random.choice([1, 2, 4]),
        "n_shared_experts": random.choice([1, 2]),
        "first_k_dense_replace": random.choice([0, 1, 4]),
        "routed_scaling_factor": random.choice([1.0, 1.5]),
        "norm_topk_prob": random.random() < 0.5,
        "partial_rotary_factor": random.choice([0.5, 1.0]),
        "num_mtp_layers": 0,
        "tie_word_embeddings": random.random() < 0.5,
        **groups,
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n_group": 3}, "got n_group=3"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
]
