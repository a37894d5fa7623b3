"""Tiny vision-language models and runs with them, for `test_vision_language.py`."""

from pathlib import Path
from typing import Any

import torch
import transformers

import ms_data
from ms_parallel import AdamWConfig, Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect
from ms_parallel.models import MultimodalModel

OPTIMIZER = AdamWConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=20)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "patch_size": 14,
        "num_position_embeddings": 16,
    },
}


def tiny(model_type: str, shards: Path) -> Any:
    """A random model with the tokenizer's image tokens."""
    tokenizer = ms_data.Tokenizer.load(shards)
    text = {**TEXT, "vocab_size": tokenizer.vocabulary_size}
    ids = {
        "image_token_id": tokenizer.special_token("<|image_pad|>"),
        "video_token_id": tokenizer.special_token("<|video_pad|>"),
        "vision_start_token_id": tokenizer.special_token("<|vision_start|>"),
        "vision_end_token_id": tokenizer.special_token("<|vision_end|>"),
    }
    if model_type == "qwen3_vl":
        text["head_dim"] = 8
    config = transformers.AutoConfig.for_model(
        model_type,
        text_config=text,
        vision_config=VISION[model_type],
        tie_word_embeddings=False,
        **ids,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)  # large enough to be sensitive to pictures and positions
    return model


def batch_of(shards: Path, place: Any = None) -> dict[str, Any]:
    """All samples, packed into few rows."""
    stream = ms_data.InstructionStream(
        shards, sequence_length=192, batch_size=6, epochs=1, shuffle=False, place=place
    )
    batch: dict[str, Any] = dict(next(stream))
    assert next(stream, None) is None
    assert stream.counts["shards"]["drawn"] == 12
    return batch


def train_model(model_type: str, shards: str, size: int | None) -> list[float]:
    """Losses of three updates on two data ranks with different rows."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse("data=2"), device="cpu", timeout_s=120)
    model = MultimodalModel(tiny(model_type, Path(shards)))
    engine = Engine(
        model, groups=groups, plan=model.plan, optimizer=OPTIMIZER, microbatch_size=size
    )
    rows = batch_of(Path(shards), place=groups.place)
    return [engine.step(rows, NextTokenLoss()).loss for _ in range(3)]
