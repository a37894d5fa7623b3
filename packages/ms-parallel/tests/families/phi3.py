"""Phi-3."""

from random import Random
from typing import Any

MODEL_TYPE = "phi3"


def draw(random: Random) -> dict[str, Any]:
    """Random settings of a small model."""
    share = random.choice([1.0, 0.5])
    factors = {
        name: [1 + most * random.random() for _ in range(int(8 * share) // 2)]
        for name, most in (("short_factor", 1), ("long_factor", 8))
    }
    original = {"original_max_position_embeddings": random.choice([16, 64])}
    kinds = {"type": "longrope"}, {"type": "su", **original}, {"type": "yarn", **original}
    long = {"rope_scaling": {**factors, **random.choice(kinds)}, **original}
    return {
        "tie_word_embeddings": random.random() < 0.5,
        "sliding_window": random.choice([None, 5]),
        "partial_rotary_factor": share,
        "num_key_value_heads": random.choice([1, 2, None]),
        **random.choice([{}, long, long]),
    }


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_type must be 'default' or 'longrope', got 'linear'",
    ),
    ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "needs 'short_factor'"),
    ({"resid_pdrop": 0.1}, "resid_pdrop=0.1 is not supported"),
]
