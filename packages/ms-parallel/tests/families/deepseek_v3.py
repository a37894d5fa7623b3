"""DeepSeek-V3."""

from random import Random
from typing import Any

MODEL_TYPE = "deepseek_v3"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    groups = random.choice([(1, 1), (2, 1), (4, 2), (4, 4)])
    scales = random.choice([{}, {"mscale": 1.0, "mscale_all_dim": 0.7}])
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    return {
        "num_key_value_heads": 4,
        "q_lora_rank": random.choice([None, 12]),
        "kv_lora_rank": random.choice([8, 10]),
        "qk_nope_head_dim": random.choice([6, 8]),
        "qk_rope_head_dim": random.choice([4, 8]),
        "v_head_dim": random.choice([6, 10, 16]),
        "attention_bias": random.random() < 0.5,
        "rope_interleave": random.random() < 0.7,
        "moe_intermediate_size": random.choice([12, 20]),
        "n_routed_experts": 8,
        "num_experts_per_tok": random.choice([1, 2, 4]) if groups != (2, 1) else 2,
        "n_shared_experts": random.choice([1, 2]),
        "n_group": groups[0],
        "topk_group": groups[1],
        "first_k_dense_replace": random.choice([0, 1, 4]),
        "routed_scaling_factor": random.choice([1.0, 2.5]),
        "norm_topk_prob": random.random() < 0.5,
        "num_mtp_layers": 0,
        "rms_norm_eps": random.choice([1e-6, 1e-3]),
        "tie_word_embeddings": random.random() < 0.3,
        **random.choice([{}, {"rope_parameters": {"rope_theta": 1e4, **yarn, **scales}}]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported; only 'sigmoid' is"),
    ({"topk_method": "greedy"}, "topk_method='greedy' is not supported; only 'noaux_tc' is"),
    ({"n_group": 3}, "got n_group=3"),
]
