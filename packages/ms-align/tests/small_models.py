"""Small models and rewards shared by the tests."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ms_align import Sample

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 258,
    "tie_word_embeddings": True,
}


def decoder(name: str = "llama", seed: int = 0, **overrides: Any) -> nn.Module:
    """Build a byte-level decoder of ms-parallel."""
    from ms_parallel.models import architecture, build_model
    from ms_parallel.weights import initialize

    sizes = {key: value for key, value in SIZES.items() if key != "tie_word_embeddings"}
    model = build_model(architecture(name, {**sizes, "tie_word_embeddings": True, **overrides}))
    initialize(model, seed=seed)
    with torch.no_grad():  # logits far from uniform, so errors show
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


def llama(seed: int = 0) -> nn.Module:
    """Build the same architecture with transformers, with rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=128))
    return _sharpen(model)


def gpt2(seed: int = 0) -> nn.Module:
    """Build a transformers model with learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=258, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return _sharpen(GPT2LMHeadModel(config))


def alibi_model(family: str) -> nn.Module:
    """Build a transformers model with ALiBi attention."""
    import transformers as t

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 258, "hidden_size": 32, "num_attention_heads": 4}
    if family == "bloom":
        return _sharpen(t.BloomForCausalLM(t.BloomConfig(n_layer=2, **sizes)))
    if family == "falcon":
        config = t.FalconConfig(num_hidden_layers=2, alibi=True, bos_token_id=0, **sizes)
        return _sharpen(t.FalconForCausalLM(config))
    config = t.MptConfig(vocab_size=258, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    return _sharpen(t.MptForCausalLM(config))


def _sharpen(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    return model.eval()


def vowels(samples: Sequence[Sample]) -> list[float]:
    """Reward: fraction of vowels among the response tokens."""
    return [
        sum(token in (97, 101, 105, 111, 117) for token in sample.response_tokens)
        / max(len(sample.response_tokens), 1)
        for sample in samples
    ]
