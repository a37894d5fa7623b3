"""Runs of `test_families.py`: gradients and generated text of families under a layout."""

from typing import Any

import torch
from runs import FAMILIES
from splits import PLAIN, full_gradients

from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.models import architecture

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.1,
}


def gradients_and_text(layout: str, families: dict[str, str]) -> dict[str, Any]:
    """Gradients of each family and its greedy continuations of two prompts."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=60)
    results = {}
    for name, model_type in families.items():
        config = architecture(model_type, {**SIZES, **FAMILIES.get(model_type, {})})
        engine = Engine(config, groups=groups, microbatch_size=1, optimizer=PLAIN)
        text = engine.generate([[1, 2, 3], [4, 5, 6, 7, 8, 9]], max_new_tokens=4, temperature=0)
        results[name] = {"gradients": full_gradients(engine, 2), "text": text}
    return results
