"""Small models shared by the tests."""

import torch
import transformers
from torch import nn

from ms_compress.targets.rules import NAMES, scheme
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize

SINGLE_LEVEL = [name for name in NAMES if scheme(name).super_block is None]
"""Schemes without super-blocks; test_k_quants.py tests the others."""
VOCABULARY = 192
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOWED = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "sliding_window": 8,
}


def decoder(layers: int = 2, *, tied: bool = True, seed: int = 0) -> Decoder:
    """An ms-parallel decoder with weights large enough for distinct logits."""
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    model = Decoder(config)
    initialize(model, seed)
    return enlarge(model)


def llama(layers: int = 2, *, tied: bool = False, inner: int = 256) -> nn.Module:
    """A transformers Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
    )
    return enlarge(transformers.LlamaForCausalLM(config))


def qwen3(layers: int = 2) -> nn.Module:
    """A transformers Qwen 3, whose heads are normalized and whose keys are not permuted."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    return enlarge(transformers.Qwen3ForCausalLM(config))


def qwen2(*layer_types: str, window: int = 8) -> nn.Module:
    """A transformers Qwen 2 with a layer per `full_attention` or `sliding_attention`."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        use_sliding_window=True,
        sliding_window=window,
        layer_types=list(layer_types),
    )
    return enlarge(transformers.Qwen2ForCausalLM(config))


def gemma3(*layer_types: str) -> nn.Module:
    """A transformers Gemma 3, whose layer types have separate masks and rotary tables."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=len(layer_types), layer_types=list(layer_types), **WINDOWED
    )
    return enlarge(transformers.Gemma3ForCausalLM(config))


def qwen2_windowed(layers: int, first: int) -> nn.Module:
    """A transformers Qwen 2 with a window from layer `first` on."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        num_hidden_layers=layers, use_sliding_window=True, max_window_layers=first, **WINDOWED
    )
    return enlarge(transformers.Qwen2ForCausalLM(config))


def deepseek() -> nn.Module:
    """A transformers DeepSeek V3, whose routing bias is a stored buffer."""
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
    )
    model = enlarge(transformers.DeepseekV3ForCausalLM(config))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    return model


def enlarge(model: nn.Module) -> nn.Module:
    """Triple the matrices, for logits with a spread of about 0.7, and randomize the norms.

    With norms of one, a 4-bit embedding gives inputs exactly between two 8-bit codes.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def tokens(rows: int = 2, positions: int = 48, seed: int = 0) -> torch.Tensor:
    """Return random tokens (rows, positions) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, positions), generator=generator)
